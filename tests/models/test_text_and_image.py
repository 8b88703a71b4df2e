"""transformers and open_clip: small models made here, compared with what the libraries compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ModelUnavailable, NotApplicable, UnknownName
from clairvit.models.image_files import read_image
from clairvit.models.images import to_pixels
from clairvit.models.load_options import seeded
from helpers.rounding import assert_same, growth


def scores(model: cv.Model) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(torch.zeros(1, 3, *model.preprocess.size, dtype=model.dtype))


# hf -------------------------------------------------------------------------------------------------------------------


def small_vit(**options: object) -> dict[str, object]:
    sides = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return {**sides, "image_size": 32, "patch_size": 8, **options}


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    labels = {0: "cat", 1: "dog", 2: "newt"}
    config = transformers.ViTConfig(**small_vit(id2label=labels, label2id={v: k for k, v in labels.items()}))
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    size = {"height": 32, "width": 48}
    transformers.ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], resample=3).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_hf_folder(hf_folder: Path) -> None:
    model = cv.load(f"hf:{hf_folder}")
    assert model.labels == ("cat", "dog", "newt")
    assert model.preprocess.size == (32, 48)
    assert model.preprocess.resize == (32, 48)
    assert not model.preprocess.keep_ratio
    assert model.preprocess.mean == pytest.approx((0.1, 0.2, 0.3))
    assert model.preprocess.interpolation == "bicubic"
    assert model.classifier
    with torch.no_grad():
        assert model.logits(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    again = cv.load(f"hf:{hf_folder}", pretrained=False)
    ours, theirs = model.module.state_dict(), again.module.state_dict()
    assert not torch.equal(ours["classifier.weight"], theirs["classifier.weight"])


def test_hf_preprocessing_is_close_to_the_processor(hf_folder: Path) -> None:
    import transformers

    image = read_image("demo")
    ours = to_pixels(image, cv.load(f"hf:{hf_folder}").preprocess)
    theirs = transformers.AutoImageProcessor.from_pretrained(hf_folder)(image, return_tensors="pt").pixel_values[0]
    assert (ours - theirs).abs().mean() < 0.02  # torchvision's tensor resize, not Pillow's: rounding differs


def test_hf_folder_without_a_processor_or_weights(hf_folder: Path) -> None:
    (hf_folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        ModelUnavailable, match=r"has no preprocessor_config\.json, so its mean, std .* load it with mean= and std="
    ):
        cv.load(f"hf:{hf_folder}")
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"could not be loaded \(OSError"):
        cv.load(f"hf:{hf_folder}")


def test_hf_weights_without_a_head_raise(hf_folder: Path) -> None:

    state = load_file(hf_folder / "model.safetensors")
    save_file(
        {k: v for k, v in state.items() if "classifier" not in k}, hf_folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        ModelUnavailable, match=r"lack 2 of the model's tensors \(classifier\.bias, classifier\.weight\)"
    ):
        cv.load(f"hf:{hf_folder}")


def test_hf_backbone_has_no_classes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Dinov2Model(transformers.Dinov2Config(**small_vit())).save_pretrained(tmp_path)
    transformers.BitImageProcessor(size={"shortest_edge": 40}, crop_size=32).save_pretrained(tmp_path)
    model = cv.load(f"hf:{tmp_path}")
    assert not model.classifier
    assert model.preprocess.resize == 40
    assert model.preprocess.size == (32, 32)
    assert scores(model).shape == (1, 16)


def test_hf_clip_with_prompts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<end>", "a", "cat", "dog", "?"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")
    text = {**small_vit(), "vocab_size": 6, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
    text |= {"max_position_embeddings": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=small_vit(), projection_dim=12)
    pair = transformers.CLIPModel(config).eval()
    pair.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path)

    prompts = ["a cat", "dog"]
    model = cv.load(f"hf:{tmp_path}", labels=prompts, dtype="float64")
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():  # prompts are read once, in float32, whatever the model's dtype; the image is float64
        tokens = tokenizer(prompts, padding=True, return_tensors="pt")
        text = pair(**tokens, pixel_values=pixels.float()).text_embeds.double()
        image = pair.double().vision_model(pixels).pooler_output @ pair.visual_projection.weight.T
        cosines = nn.functional.cosine_similarity(image[:, None], text[None], dim=-1)
        # float32: lengths of 12 numbers
        expected = model.module.scale * cosines
        assert_same(model.logits(pixels), expected, growth=growth(1, 12), dtype=torch.float32)
    assert model.labels == ("a cat", "dog")
    assert model.classifier
    assert not any("text_model" in name for name, _ in model.module.named_parameters())
    tower = cv.load(f"hf:{tmp_path}")
    assert not tower.classifier
    assert scores(tower).shape == (1, 12)
    assert not any("text_model" in name for name, _ in tower.module.named_parameters())
    assert tower.text_encoder is not None
    assert_same(tower.text_encoder.encode(prompts), nn.functional.normalize(text.float()), growth=growth(1, 12))
    assert tower.text_encoder.tower.module.vision_model is None  # the text tower alone is kept
    assert cv.explain(tower, "demo", "ixg", targets=[cv.Text(p) for p in prompts]).targets == tuple(prompts)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # transformers then makes a tokenizer without words
        (tmp_path / name).unlink()
    with pytest.raises(BadInput, match="The tokenizer knows no word of 'a cat'"):
        cv.explain(cv.load(f"hf:{tmp_path}"), "demo", "ixg", target=cv.Text("a cat"))
    tokenizer.save_pretrained(tmp_path)
    larger = cv.load(f"hf:{tmp_path}", size=48)
    assert cv.explain(larger, "demo", "ixg", target=cv.Text("dog")).maps.shape == (1, 6, 6)


def test_hf_model_types() -> None:
    pytest.importorskip("transformers")
    model = cv.load("hf:vit", pretrained=False, size=32, labels=["yes", "no", "maybe"])
    assert model.labels == ("yes", "no", "maybe")
    assert scores(model).shape == (1, 3)
    with pytest.raises(BadInput, match="'hf:vit' is a model type without weights; give a hub id"):
        cv.load("hf:vit")
    with pytest.raises(UnknownName, match=r"neither a folder, nor a hub id.*Did you mean 'dinov2'"):
        cv.load("hf:dinov22", pretrained=False)
    with pytest.raises(cv.ClairError, match="does not take images"):
        cv.load("hf:bert", pretrained=False)
    with pytest.raises(ModelUnavailable, match="has no tokenizer to read prompts with"):
        cv.load("hf:clip", pretrained=False, labels=["a", "b"])
    clip = cv.load("hf:clip", pretrained=False, size=32)
    with pytest.raises(ModelUnavailable, match="has no tokenizer to read prompts with"):
        cv.explain(clip, "demo", "ixg", target=cv.Text("a cat"))


# open_clip ------------------------------------------------------------------------------------------------------------


def test_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = pytest.importorskip("open_clip")
    prompts = ["a cat", "a dog", "a newt"]
    small = {"embed_dim": 32, "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8}}
    small["text_cfg"] = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", small)
    model = cv.load("open_clip:tiny", pretrained=False, labels=prompts, dtype="float64")
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad(), seeded():
        pair = open_clip.create_model("tiny", pretrained=None).eval()
        # prompts are read once, in float32, whatever the model's dtype; the image is float64
        text = pair.encode_text(open_clip.get_tokenizer("tiny")(prompts)).double()
        image = pair.double().encode_image(pixels)
        expected = model.module.scale * nn.functional.cosine_similarity(image[:, None], text[None], dim=-1)
        # float32: lengths of 32 numbers
        assert_same(model.logits(pixels), expected, growth=growth(1, 32), dtype=torch.float32)
    assert model.labels == tuple(prompts)
    assert model.classifier
    loaded: list[str] = []
    create = open_clip.create_model
    monkeypatch.setattr(
        open_clip, "create_model", lambda name, **options: (loaded.append(name), create(name, **options))[1]
    )
    assert cv.explain(model, "demo", "ixg", target=cv.Text("a dog", against=None)).targets == ("a dog",)
    assert not loaded  # the labels' embeddings are known
    tower = cv.load("open_clip:tiny", pretrained=False)
    assert not tower.classifier
    assert tower.text_encoder is not None
    assert loaded == ["tiny"]
    # float32, the random weights of one seed in both loads; unit vectors of 32 numbers
    assert_same(tower.text_encoder.encode(prompts), model.module.text.float(), growth=growth(1, 32))
    tower.text_encoder.encode(["a cat", "a bird"])
    assert loaded == ["tiny", "tiny"]  # the text tower is loaded once, when first needed
    with pytest.raises(BadInput, match="has 102 tokens, and the text tower reads 77"):
        tower.text_encoder.encode(["cat " * 100])
    assert cv.explain(
        cv.load("open_clip:tiny", pretrained=False, size=48), "demo", "ixg", target=cv.Text("a cat")
    ).maps.shape == (1, 6, 6)
    assert scores(tower).shape == (1, 32)
    assert tower.preprocess.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))


def test_an_image_tower_alone_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights without a text tower give an embedding of images, by open_clip and by timm; prompts are refused."""
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 224, "layers": 10, "width": 256, "patch_size": 16, "head_width": 64}
    small = {"embed_dim": 24, "vision_cfg": vision}
    small["text_cfg"] = {"context_length": 77, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", small)
    torch.manual_seed(0)
    pair = open_clip.create_model("tiny", pretrained=None).eval()
    path = tmp_path / "tower.safetensors"
    tower = {key: value for key, value in pair.state_dict().items() if key.startswith("visual.")}
    save_file(tower, path)
    pixels = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = pair.encode_image(pixels)
    for model in (cv.load(f"open_clip:tiny:{path}"), cv.load(f"file:{path}", arch="timm:vit_xsmall_patch16_clip_224")):
        assert not model.classifier
        assert model.text_encoder is None
        assert_same(scores_of(model, pixels), expected, growth=growth(10, 1024))
        with pytest.raises(NotApplicable, match="has no text tower, so it cannot compare an image with 'a cat'"):
            cv.explain(model, "demo", "ixg", target=cv.Text("a cat"))
    with pytest.raises(NotApplicable, match="no text tower, so it cannot encode labels"):
        cv.load(f"open_clip:tiny:{path}", labels=["a cat", "a dog"])
    with pytest.raises(BadInput, match="the image tower of a CLIP, which has no classes"):
        cv.load(f"file:{path}", arch="timm:vit_xsmall_patch16_clip_224", labels=["a cat", "a dog"])
    del tower["visual.proj"]
    save_file(tower, path)
    with pytest.raises(ModelUnavailable, match=r"1 missing \(proj\)"):
        cv.load(f"open_clip:tiny:{path}")


def scores_of(model: cv.Model, pixels: Tensor) -> Tensor:
    """Return the embeddings of images."""
    with torch.no_grad():
        return model.logits(pixels)
