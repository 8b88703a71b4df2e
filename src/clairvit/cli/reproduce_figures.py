"""`clairvit reproduce … --figures`: the options, and the figures of one finished run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clairvit.cli import options
from clairvit.cli.declare import group, option
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.models.model import Model
    from clairvit.papers.figures import FigureContent
    from clairvit.papers.reproduce import Reproduction
    from clairvit.papers.setup import LoadedData


@group("Figures")
class FigureOptions:
    """Whether the paper's figures are drawn, and from what."""

    figures: bool = option(False, "Draw the paper's figures from your images; with --out.")
    figure_images: int | None = option(
        None, "Photos in a figure where the paper's own are not at hand.", "N", shown="the paper's file says", min=1
    )
    second_model: str | None = option(
        None, "A second model, for figures that show one next to the first, such as a CNN.", "NAME"
    )

    def check(self, out: str | None) -> None:
        """Raise BadInput for options that need others."""
        for flag, value in (("--figure-images", self.figure_images), ("--second-model", self.second_model)):
            if value is not None and not self.figures:
                raise BadInput(f"{flag} {value} is of figures; expected it with --figures.")
        if self.figures and out is None:
            raise BadInput("--figures writes pictures; expected --out DIR.")

    def compute(
        self, result: Reproduction, model: Model, data: LoadedData, models: options.ModelOptions
    ) -> tuple[FigureContent, ...]:
        """Return what the figures of a run show; none unless they were asked for."""
        from clairvit.papers.figures import FigureInputs, compute_figures

        if not self.figures:
            return ()
        second = None if self.second_model is None else models.load(self.second_model)
        return tuple(compute_figures(FigureInputs(result, model, data, self.figure_images, second)))
