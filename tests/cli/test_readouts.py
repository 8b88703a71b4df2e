"""`--text` and `--similar-to` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clairvit.cli import main
from clairvit.models.image_files import read_image
from helpers.tiny_pairs import save_clip

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small CLIP in a folder, as the options of a command, and two photos."""
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        read_image("demo").transpose(list(Image.Transpose)[number]).save(tmp_path / f"cat-{number}.png")
    return ["--model", f"hf:{save_clip(tmp_path / 'clip')}"]


def test_prompts_side_by_side(clip: list[str], capsys: Captured) -> None:
    typed = ["--text", "a red car", "--text", "a dog", "--method", "ixg"]
    assert main(["explain", "cat-0.png", *clip, *typed, "--out", "cat.png", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["targets"] == ["a red car", "a dog"]
    assert result["score"] == "difference of cosines"
    assert sum("minus the mean cosine of 20 neutral prompts" in note for note in result["notes"]) == 2
    assert all(-1 <= value <= 1 for value in result["target_scores"])
    assert result["probabilities"] == [None, None]
    assert main(["compare", "cat-0.png", *clip, "--method", "ixg,rollout", "--text", "a dog", "--json"]) == 0
    assert "a dog" in capsys.readouterr().out


def test_scores_by_a_prompt(clip: list[str], capsys: Captured) -> None:
    options = ["--method", "ixg", "--metric", "deletion(steps=2)", "--json"]
    assert main(["evaluate", "cat-0.png", "cat-1.png", *clip, *options, "--text", "a dog"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "a dog"
    assert main(["evaluate", "cat-0.png", *clip, *options, "--text", "a dog", "--text", "a cat"]) == 2
    assert "2 targets were given by --target, --text and the like; expected one" in capsys.readouterr().err


def test_neutral_prompts_are_subtracted(clip: list[str], capsys: Captured) -> None:
    def scores(*options: str) -> list[float]:
        assert main(["explain", "cat-0.png", *clip, "--method", "ixg", "--out", "cat.png", "--json", *options]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        return list(result["target_scores"])

    prompts = ["--text", "a red car", "--text", "a dog"]
    car, dog, photo, street = scores(*prompts, "--text", "a photo", "--text", "a street", "--no-neutral")
    against = scores(*prompts, "--against", "a photo", "--against", "a street")
    neutral = (photo + street) / 2
    assert against == pytest.approx([car - neutral, dog - neutral], abs=16 * 1.2e-7)  # cosines in float32
    options = ["--method", "ixg", "--metric", "deletion(steps=2)", "--json", "--text", "a dog", "--against", "a photo"]
    assert main(["evaluate", "cat-0.png", *clip, *options]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "a dog against a photo"
    assert main(["evaluate", "cat-0.png", *clip, *options[:-2], "--no-neutral"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "a dog alone"


def test_texts_are_read_from_a_file_of_embeddings(clip: list[str], capsys: Captured, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 12))
    np.savez(tmp_path / "texts.npz", **dict(zip(("cat", "dog", "car"), vectors, strict=True)))
    typed = ["explain", "cat-0.png", *clip, "--method", "ixg", "--out", "cat.png", "--json", "--text-features"]

    def score(name: str, *options: str) -> float:
        assert main([*typed, str(tmp_path / "texts.npz"), "--text", name, *options]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        assert result["targets"] == [name]
        return float(result["target_scores"][0])

    cat, dog, car = (score(name, "--no-neutral") for name in ("cat", "dog", "car"))
    assert score("cat") == pytest.approx(cat - (dog + car) / 2, abs=16 * 1.2e-7)  # cosines in float32
    assert score("cat", "--against", "dog") == pytest.approx(cat - dog, abs=16 * 1.2e-7)
    assert main([*typed, str(tmp_path / "texts.npz"), "--text", "cta"]) == 2
    assert "'texts.npz' has no text 'cta'. Did you mean 'cat'" in capsys.readouterr().err


def test_channels_that_pictures_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    module = "vit_tiny_patch16_224', img_size=32, patch_size=8, in_chans=4, embed_dim=24, num_heads=2, depth=2"
    (tmp_path / "four_channels.py").write_text(
        f"import timm\n\n\ndef build():\n    return timm.create_model('{module}, num_classes=3)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Image.effect_noise((40, 40), 80).convert("RGBA").save("noise.png")
    typed = ["explain", "noise.png", "--model", "four_channels:build", "--method", "saliency"]
    assert main([*typed, "--display", "3,2,1", "--out", "shown.png", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert any("pictures show channels 3, 2 and 1 of 4" in note for note in result["notes"])
    for channels, sentence in (("4,2,1", "expected the indices in 0…3"), ("a", "--display a was given; expected")):
        assert main([*typed, "--display", channels]) == 2
        assert sentence in capsys.readouterr().err


def test_both_photos_are_drawn(clip: list[str], tmp_path: Path, capsys: Captured) -> None:
    for model in (clip, []):
        assert (
            main(["explain", "cat-0.png", *model, "--similar-to", "cat-1.png", "--method", "ixg", "-o", "a.png"]) == 0
        )
        assert (tmp_path / "a-similar.png").stat().st_size > 0
        (tmp_path / "a-similar.png").unlink()


def test_the_value_that_is_explained_is_printed(clip: list[str], capsys: Captured) -> None:
    typed = ["explain", "cat-0.png", *clip, "--text", "a dog", "--method", "ixg", "-o", "a.png"]
    assert main([*typed, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    for options, heading, value in (
        ([], "difference of cosines", result["target_scores"][0]),
        (["--no-neutral"], "cosine", None),
        (["--score", "logit"], "difference of logits", None),
    ):
        assert main([*typed, *options]) == 0
        printed = capsys.readouterr().out
        assert heading in printed
        assert value is None or f"{value:.4g}" in printed


def test_neurons_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["--neuron", "3,17", "--neuron", "8,5@5,4", "--method", "ixg", "-o", "n.png"]
    assert main(["explain", "demo", *typed, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["targets"] == ["layer 3, channel 17", "layer 8, patch (5, 4), channel 5"]
    assert result["score"] == "activation"
    assert main(["explain", "demo", *typed]) == 0
    assert "class" not in capsys.readouterr().out  # channels are no classes that the model sees
    options = ["--neuron", "3,17", "--method", "ixg", "--metric", "deletion(steps=2)", "--json"]
    assert main(["evaluate", "demo", *options]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "neuron 3,17"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--neuron", "3"], "--neuron 3 was given; expected LAYER,CHANNEL such as 3,17"),
        (["--neuron", "3,17@a,b"], "--neuron 3,17@a,b was given; expected"),
        (["--neuron", "99,0"], "There is no layer 99"),
        (["--neuron", "3,17@99,0"], "There is no patch (99, 0)"),
        (["--text", " "], "An empty prompt was given"),
        (["--text", "a cat"], "pets has no text tower"),
        (["--against", "a photo"], "--against was given without a prompt"),
        (["--no-neutral"], "--no-neutral was given without a prompt"),
        (["--text", "a", "--against", "b", "--no-neutral"], "--against and --no-neutral were given"),
        (["--text", "a cat", "--text-features", "nowhere.npz"], "'nowhere.npz' is not there"),
        (["--model", "open_clip:ViT-Z-99", "--text", "a cat"], "open_clip has no model 'ViT-Z-99'"),
        (["--similar-to", "nowhere.jpg"], "nowhere.jpg"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(options: list[str], message: str, capsys: Captured) -> None:
    assert main(["explain", "demo", *options]) == 2
    printed, errors = capsys.readouterr()
    assert message in errors
    assert "Traceback" not in printed + errors
