"""--prompt, --word and --generate: words of a vision-language model on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clairvit as cv
from clairvit.cli import main
from helpers.vision_language import PROMPT, llava_processor, piece_tokenizer, saved_llava, tiny_language_model

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{saved_llava(tmp_path_factory.mktemp('llava'))}"


def explain(model: str, *options: str) -> int:
    return int(main(["explain", "demo", "--model", model, "--method", "ixg", *options]))


def test_words_are_explained_side_by_side(model: str, tmp_path: Path, capsys: Captured) -> None:
    out = str(tmp_path / "words.png")
    assert explain(model, "--prompt", PROMPT, "--word", "cat,dog", "--out", out, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["targets"] == ["cat", "dog"]
    assert [len(text["values"]) for text in result["text_relevance"]] == [8, 8]


def test_without_a_word_the_next_one_is_explained(model: str, tmp_path: Path, capsys: Captured) -> None:
    assert explain(model, "--prompt", PROMPT, "--out", str(tmp_path / "next.png"), "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["targets"] == [result["top"][0][0]["name"]]


def test_each_word_of_the_answer_is_explained(model: str, tmp_path: Path, capsys: Captured) -> None:
    assert explain(model, "--prompt", PROMPT, "--generate", "--out", str(tmp_path / "answer.png"), "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    targets = cv.generate(model, "demo", PROMPT)
    assert result["classes"] == [target.token for target in targets]
    assert len(result["maps"]) == len(targets) > 1


def test_a_word_of_several_tokens_and_a_question_that_is_missing(tmp_path: Path, capsys: Captured) -> None:
    tiny_language_model("llava", torch.float32).save_pretrained(tmp_path)
    processor = llava_processor()
    processor.tokenizer = piece_tokenizer()
    processor.save_pretrained(tmp_path)
    assert explain(f"hf:{tmp_path}", "--prompt", PROMPT, "--word", "catdog") == 2
    assert "'catdog' is 2 tokens of this model: 'cat', '##dog'; expected one." in capsys.readouterr().err
    assert explain(f"hf:{tmp_path}") == 2
    printed, errors = capsys.readouterr()
    assert "Name a word: --prompt 'What is this?'." in errors
    assert errors.count("\n") == 1
    assert printed == ""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--word", "cat"], "--word was given without a question; add --prompt"),
        (["--generate"], "--generate was given without a question; add --prompt"),
        (["--prompt", PROMPT, "--generate", "--word", "cat"], "--word and --generate were given"),
        (["--prompt", PROMPT, "--word", "zebra"], "no token for 'zebra'"),
        (["--prompt", PROMPT, "--word", ","], "names nothing"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    model: str, options: list[str], sentence: str, capsys: Captured
) -> None:
    assert explain(model, *options) == 2
    assert sentence in capsys.readouterr().err


def test_images_are_scored_by_a_word(model: str, tmp_path: Path, capsys: Captured) -> None:
    options = ["--method", "ixg", "--metric", "deletion(steps=2)", "--out", str(tmp_path), "--json"]
    assert main(["evaluate", "demo", "--model", model, "--prompt", PROMPT, "--word", "cat", *options]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "cat"
    assert main(["evaluate", "demo", "--model", model, "--prompt", PROMPT, "--word", "cat,dog", *options]) == 2
    assert "2 targets were given" in capsys.readouterr().err


def test_a_classifier_writes_no_words(capsys: Captured) -> None:
    assert explain("pets", "--prompt", PROMPT) == 2
    assert "writes no text" in capsys.readouterr().err
