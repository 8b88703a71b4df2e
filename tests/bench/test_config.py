"""A study in a TOML file: what it says, and every mistake in it with its line and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from clairvit.bench.config import StudyConfig, read_config
from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.errors import BadInput


def read(folder: Path, text: str) -> StudyConfig:
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return read_config(folder / "study.toml")


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(BadInput) as caught:
        read(folder, text)
    return str(caught.value).removeprefix(str(folder / "study.toml"))


def test_every_setting_is_read(tmp_path: Path) -> None:
    text = """
    models = ["pets", {spec = "file:a.safetensors", arch = "timm:vit_tiny", labels = ["a", "b"], pretrained = false}]
    data = [{spec = "pets:/p", split = "test", limit = 3}, {spec = "folder:x", masks = "m", mask_kind = "voc"}]
    methods = ["legrad", "rollout(fusion=max)"]
    metrics = "deletion,insertion"
    split = "val"
    limit = 9
    seed = 3
    target = "label"
    maps = "abs"
    at_once = 4
    """
    assert read(tmp_path, text) == StudyConfig(
        (ModelConfig("pets"), ModelConfig("file:a.safetensors", "timm:vit_tiny", ("a", "b"), False)),
        (DataConfig("pets:/p", "test", 3), DataConfig("folder:x", None, None, "m", "voc")),
        ("legrad", "rollout(fusion=max)"),
        ("deletion,insertion",),
        "val",
        9,
        3,
        "label",
        "abs",
        4,
    )


def test_one_number_stands_for_three_channels_and_void_pixels_may_count(tmp_path: Path) -> None:
    config = read(tmp_path, 'models = {spec = "a", mean = 0.5}\ndata = {spec = "x", void = "object"}\n')
    assert config.models == (ModelConfig("a", mean=0.5),)
    assert config.data == (DataConfig("x", void="object"),)


def test_tables_may_be_written_out_and_one_needs_no_list(tmp_path: Path) -> None:
    text = '[[models]]\nspec = "pets"\n[[models]]\nspec = "timm:a"\nlabels = "names.json"\n[data]\nspec = "folder:x"\n'
    config = read(tmp_path, text)
    assert config.models == (ModelConfig("pets"), ModelConfig("timm:a", labels="names.json"))
    assert config.data == (DataConfig("folder:x"),)
    assert (config.methods, config.seed) == (None, None)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('seed = 1\n\nmodel = "pets"\n', 3, "'model' is no key here. Did you mean 'models'"),
        ('# seed = "x"\ndata = "a"\nseed = "x"\n', 3, "'seed' is 'x'; expected a whole number."),
        ("seed = true\n", 1, "'seed' is True; expected a whole number."),
        ('[[models]]\nspec = "a"\n[[models]]\nspec = "b"\narchs = "c"\n', 5, "Did you mean 'arch'?"),
        ('[[models]]\nspec = "a"\n[[models]]\nspec = 3\n', 4, "'spec' is 3; expected a text."),
        ('[[models]]\nspec = "a"\n\n[[models]]\narch = "b"\n', 4, "without spec"),
        (
            'data = [\n  {spec = "a", limit = 2},\n  {spec = "b", limit = "2"},\n]\n',
            3,
            "'limit' is '2'; expected a whole",
        ),
        ('data = [\n  {spec = "a"},\n  {spec = "b",  lmit = 3},\n]\nseed = 1\n', 3, "Did you mean 'limit'"),
        ('seed = 1\nmethods = ["legrad", 3]\n', 2, "'methods' is 3; expected texts only."),
        ("metrics = 3\n", 1, "'metrics' is 3; expected a text or a list."),
        ("seed = 1\nmodels = [3]\n", 2, "'models' is 3; expected a text such as"),
        ('models = {spec = "a", labels = [1]}\n', 1, "'labels' is 1; expected texts only."),
        ('models = {spec = "a", pretrained = "no"}\n', 1, "expected true or false"),
        ("models = 3\n", 1, "'models' is 3; expected a text such as"),
        ('models = {spec = "a", crop = [1, 2.5]}\n', 1, "'crop' is 2.5; expected whole numbers only."),
        ('[[models]]\nspec = "a"\nresize = "x"\n', 3, "'resize' is 'x'; expected a whole number or a list."),
        ('[data]\nspec = "a"\nvoid = "x"\n', 3, "'void' is 'x'; expected 'nowhere' or 'object'."),
        ("seed = 1979-05-27\n", 1, "'seed' is datetime.date(1979, 5, 27); expected a whole number."),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(f", line {line}: "), message
    assert words in message


def test_what_is_not_toml_and_what_is_not_there(tmp_path: Path) -> None:
    assert "is not TOML" in refusal(tmp_path, "seed = 1\nmodels = [\n")
    (tmp_path / "study.toml").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="UTF-8"):
        read_config(tmp_path / "study.toml")
    with pytest.raises(BadInput, match="cannot be read"):
        read_config(tmp_path / "none.toml")
