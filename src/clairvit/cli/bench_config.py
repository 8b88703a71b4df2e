"""The study of `clairvit bench`, from a file and from options, which win over the file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clairvit.bench import METHODS, METRICS
from clairvit.cli import options
from clairvit.cli.arguments import resolve_methods, resolve_metrics
from clairvit.cli.declare import group, option
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.config import StudyConfig
    from clairvit.bench.plan import ModelConfig, Study


@group()
class StudyOptions:
    """The options that define a study; None where nothing was typed."""

    model: list[str] | None = options.model_list("Models, separated by commas or repeated.")
    method: list[str] | None = options.method_list(
        f"{options.METHODS_HELP} random and center are scored as baselines.", ",".join(METHODS)
    )
    metric: list[str] | None = options.metric_list(options.METRICS_HELP, ",".join(METRICS))
    data: options.DataOptions
    masks: str | None = option(
        None,
        "With folder:PATH: a folder with a mask for each image, 'cat.png' for 'cat.jpg'.",
        "DIR",
        panel="Annotations",
    )
    mask_kind: str | None = options.mask_kind(None)
    target: str | None = options.single_target("'label': the true class; default: the prediction.", None)
    maps: str | None = options.MAPS_TYPED
    seed: int | None = option(None, "Seed of everything random.", shown="0", panel=options.RUN)
    model_options: options.ModelOptions
    autocast: str | None = options.AUTOCAST

    def study(self, config: StudyConfig) -> Study:
        """Return the study of a file and the options."""
        from clairvit.bench.config import DataConfig, StudyConfig
        from clairvit.bench.study_file import study_of

        if self.data.data is None and config.data is None:
            raise BadInput("Which images? Expected --data folder:PATH (or pets:PATH, …), or data = … in the file.")
        entries = config.data or () if self.data.data is None else tuple(map(DataConfig, self.data.specs()))
        typed: dict[str, Any] = {"masks": self.masks, "mask_kind": self.mask_kind}
        changes = {name: value for name, value in typed.items() if value is not None}
        overrides = StudyConfig(
            models=self._models(config),
            data=tuple(replace(entry, **changes) for entry in entries),
            split=self.data.split,
            limit=self.data.limit,
            seed=self.seed,
            target=self.target,
            maps=self.maps,
            autocast=self.autocast,
        )
        methods = resolve_methods(*self.method) if self.method else None
        return study_of(config, overrides, methods, resolve_metrics(*self.metric) if self.metric else None)

    def _models(self, config: StudyConfig) -> tuple[ModelConfig, ...]:
        """Return the models that were typed, else those of the file."""
        from clairvit.models.activation import check_activation

        loading = self.model_options
        preprocess = loading.preprocess()
        if self.model is None and config.models is not None:
            if loading.typed() or loading.no_pretrained:
                raise BadInput(
                    "--arch, --no-pretrained, --labels, --activation and preprocessing belong to --model; expected "
                    "them in the file, or both."
                )
            return config.models
        if loading.activation is not None:
            check_activation(loading.activation)
        names = options.model_names(self.model)
        if preprocess and len(names) > 1:
            raise BadInput(
                f"Preprocessing is of one model, and {len(names)} were given; expected a study file in which each has "
                "its own."
            )
        # --arch belongs to files of weights; without any, loading a model explains what it is for
        files = [name for name in names if name.startswith("file:")] or names
        return tuple(loading.config(name, loading.arch if name in files else None) for name in names)
