"""Draw docs/images/gallery/*.jpg, and write docs/gallery.md and the gallery of README.md, all from the list below.

python docs/generate_gallery.py              # everything; offline, one to two minutes; the page needs Chromium
python docs/generate_gallery.py why layers   # these pictures and the texts
python docs/generate_gallery.py --texts      # the texts only
CLAIRVIT_CLIP=FOLDER python docs/generate_gallery.py prompt    # with clip-vitb16-{visual,text-features}.safetensors

The code that is shown is the code that draws the picture, except where the caption says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
PAGE = HERE / "gallery.md"
FOLDER = HERE / "images" / "gallery"
BEGIN, END = "<!-- gallery: python docs/generate_gallery.py -->", "<!-- end of gallery -->"
HALF, FULL = 1000, 1760  # pixels: twice the width at which GitHub shows a picture, so that text stays sharp
QUALITY = 86
Names = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One task of the gallery: the question, the code that answers it, its picture and what is to be seen."""

    name: str
    title: str
    code: str
    caption: str
    alt: str
    wide: bool = False  # both columns of the README
    width: int = 0  # pixels; 0: HALF or FULL
    language: str = "python"
    names: Callable[[], Names] | None = None  # what the code reads, beyond `cv`
    made_by: str | None = None  # Python that draws the picture, where the code shown needs the reader's own photos
    readme: bool = True
    needs: str = ""  # an environment variable; where it is not set, the picture that is there stays
    page: str = ""  # where to read on, of the site

    @property
    def block(self) -> str:
        """The code as a fenced block."""
        return f"```{self.language}\n{self.code}\n```"


CLIP_WEIGHTS = "CLAIRVIT_CLIP"  # of a folder with the two files that benchmarks/clip_truth.py reads
TABBY, ESPRESSO = 281, 967  # rows of "a photo of a …" in ImageNet's order


def real_clip() -> Names:
    """Return the image tower of OpenAI's CLIP ViT-B/16, two texts, and the demo photo above one of a cup."""
    from safetensors.torch import load_file
    from skimage.data import coffee

    import clairvit as cv
    from clairvit.models.image_files import read_image

    folder = Path(os.environ[CLIP_WEIGHTS])
    clip = cv.load(f"file:{folder}/clip-vitb16-visual.safetensors", arch="timm:vit_base_patch16_clip_quickgelu_224")
    texts = load_file(folder / "clip-vitb16-text-features.safetensors")["imagenet1k_a_photo_of_a"]
    prompts = [
        cv.Text(name, embedding=texts[row], against=texts[[k for k in range(len(texts)) if k != row]])
        for name, row in (("a photo of a tabby", TABBY), ("a photo of an espresso", ESPRESSO))
    ]
    photo = Image.new("RGB", (448, 448), "white")
    for top, picture in ((0, read_image("demo")), (224, Image.fromarray(coffee()))):
        photo.paste(ImageOps.fit(picture.convert("RGB"), (448, 224), Image.Resampling.BICUBIC), (0, top))
    photo.save("a cat and a cup.png")
    return {"clip": dataclasses.replace(clip, name="CLIP ViT-B/16"), "photo": "a cat and a cup.png", "prompts": prompts}


def other_photo() -> Names:
    """Write other.png: the left part of the demo photo, mirrored."""
    from clairvit.models.image_files import read_image

    photo = read_image("demo")
    ImageOps.mirror(photo.crop((22, 0, 338, photo.height))).save("other.png")
    return {}


ITEMS = (
    Item(
        "why",
        "Why this class?",
        'cv.explain("pets", "demo").save("why.png")',
        "Red patches support the answer, blue ones oppose it. One forward and one backward pass.",
        "A photo of a cat, and the patches that support Bengal: the chin, an eye, the forehead, a corner",
        page="quick-start.md",
    ),
    Item(
        "two-classes",
        "Why this one and not that one?",
        'cv.explain("pets", "demo", target=cv.Contrast(\n    "Bengal", "Egyptian Mau")).save("two.png")',
        "The difference of two scores: red for the first class, blue for the second.",
        "The same photo, with the patches that support Bengal rather than Egyptian Mau",
        page="targets.md",
    ),
    Item(
        "prompt",
        "Where is what the prompt describes?",
        'clip = cv.load("open_clip:ViT-B-16:openai")\n'
        'prompts = [cv.Text("a photo of a tabby"), cv.Text("a photo of an espresso")]\n'
        'cv.explain(clip, photo, targets=prompts).save("prompt.png")',
        "OpenAI's CLIP ViT-B/16, each prompt compared with neutral ones. The photo is the demo photo above"
        " scikit-image's `coffee`. The weights do not come with the package; here the texts were given as embeddings,"
        " and compared with the other 999 classes of ImageNet.",
        "A cat above a cup of coffee: one prompt lights up the cat, the other one the cup",
        wide=True,
        names=real_clip,
        made_by='cv.explain(clip, photo, targets=prompts).save("prompt.png")',
        needs=CLIP_WEIGHTS,
        page="targets.md",
    ),
    Item(
        "alike",
        "What makes two photos alike?",
        'cv.match("pets", "demo", "other.png"\n    ).save("alike.png")',
        "By the cosine of the two embeddings. `other.png` is a mirrored part of the photo: the same places light up.",
        "Two photos of a cat, and the patches that make them alike: the same eye and chin in both",
        names=other_photo,
        page="targets.md",
    ),
    Item(
        "which-method",
        "Which method for my model?",
        'cv.choose(model, "photos/").plot()',
        "Ranked on your photos, with 95 % intervals and corrected tests; bold is the best and all that do not"
        " differ from it. "
        "Here: the built-in model, 200 photos of Oxford-IIIT Pet. Other models rank methods otherwise.",
        "Twenty methods ranked by insertion − deletion, with intervals; attnlrp+plus is first, random last",
        made_by="from clairvit.methods.recipe import read_recipe\n"
        'read_recipe(DOCS / "results" / "choose-pets.json").plot().figure.savefig("which-method.png", dpi=220)',
        page="choose.md",
    ),
    Item(
        "layers",
        "What happens layer by layer?",
        "clairvit explain demo --method genatt --layers",
        "Each layer on its own colour scale, the whole map last; `--heads` splits every layer into its heads.",
        "Twelve small maps of the cat, one per layer, and the map that they add up to",
        wide=True,
        language="sh",
        page="command-line.md",
    ),
    Item(
        "check",
        "Does the model use what the map marks?",
        "clairvit explain demo --check",
        "Every map can be tested: parts are taken out of the sequence, not painted over. Does the map tell what that "
        "does, and does hiding what it marks cost more?",
        "The map with its verdict: hiding the 18 % that it marks most lowers the confidence from 68 % to 29 %, hiding"
        " random parts leaves it at 68 %",
        language="sh",
        page="check.md",
    ),
    Item(
        "page",
        "Can I look around in a browser?",
        "clairvit serve",
        'A page for the photo at hand: classes, methods, layers, heads, tests. `pip install "clairvit[web]"`; '
        "photos stay on your machine.",
        "The page: the photo, its map, the classes that the model sees in it, methods to choose from, a strip"
        " of layers",
        language="sh",
        page="web.md",
    ),
    Item(
        "methods",
        "How do the methods differ?",
        'methods = ["rollout", "gradcam", "legrad", "genatt", "ixg", "attnlrp+plus", "decompx+skipplus"]\n'
        'cv.compare("pets", "demo", methods).save("methods.png")',
        "A map that looks good need not be faithful to the model: that is why there are checks and scores.",
        "The same photo by seven methods, which differ",
        wide=True,
        readme=False,
        page="which-method.md",
    ),
    Item(
        "heads",
        "Where does each head look?",
        "clairvit explain demo --method raw-attention --heads",
        "Attention of the class token: a row per layer, a column per head, then the heads fused by mean, "
        "maximum and minimum.",
        "A grid of small maps, one per layer and head",
        width=840,
        language="sh",
        readme=False,
        page="command-line.md",
    ),
    Item(
        "curves",
        "How faithful are they?",
        "clairvit evaluate demo --method attnlrp+plus,genatt,rollout,gradcam --metric deletion --out scores/",
        "The confidence while patches are taken away, the most important first: the lower the curve, the more"
        " faithful the map. "
        "One photo proves little: give it a folder, and there are intervals.",
        "Deletion curves of four methods, below that of random patches",
        language="sh",
        readme=False,
        page="metrics.md",
    ),
    Item(
        "features",
        "What has the model understood, without any class?",
        "clairvit features demo --patch 5,4",
        "The first three components of the patch tokens as colours, their norms, and their similarity to one "
        "patch (the eye).",
        "The photo, the patch tokens in colours, their norms, and the patches similar to the eye",
        wide=True,
        language="sh",
        readme=False,
        page="features.md",
    ),
)


def draw(item: Item) -> Path:
    """Run the code of an item in an empty folder and keep the picture that it writes."""
    if item.code == "clairvit serve":
        picture = photograph()
    else:
        with inside_new_folder() as folder:
            run(item)
            files = sorted(folder.rglob("*.png"), key=lambda path: path.stat().st_mtime)
            with Image.open(chosen(item, files)) as written:
                picture = written.convert("RGB")
    width = item.width or (FULL if item.wide else HALF)
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{item.name}.jpg"
    picture.save(path, quality=QUALITY, subsampling=0, optimize=True)
    return path


def run(item: Item) -> None:
    """Run an item's Python or command in this process."""
    import clairvit as cv
    from clairvit.cli import main as command_line

    if item.language == "sh":
        if command_line(shlex.split(item.code)[1:]) != 0:
            raise RuntimeError(f"'{item.code}' failed.")
        return
    names: Names = {"cv": cv, "DOCS": HERE, **(item.names() if item.names else {})}
    exec(item.made_by or item.code, names)


def chosen(item: Item, files: list[Path]) -> Path:
    """Return the picture that is shown, of those that were written: the one that is named as the item, or the last."""
    named = [path for path in files if item.name in path.stem]
    if not files:
        raise FileNotFoundError(f"The code of '{item.name}' wrote no picture.")
    return (named or files)[-1]


@contextlib.contextmanager
def inside_new_folder() -> Iterator[Path]:
    """Work in an empty folder that is removed afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def photograph() -> Image.Image:
    """Return a screenshot of the page's first screen, after the map was tested."""
    import io

    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-c", "from clairvit.cli import main; main(['serve', '--port', '0'])"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "http://" in line).split()[1]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1280, "height": 920})
                page.goto(address)
                page.wait_for_selector("#map-panel[aria-busy=false]", timeout=120_000)
                page.wait_for_selector("#badge:not([disabled])", timeout=120_000)
                page.wait_for_timeout(500)
                content = page.screenshot()
                browser.close()
        finally:
            server.terminate()
    with Image.open(io.BytesIO(content)) as screenshot:
        return screenshot.convert("RGB")


def readme_cell(item: Item) -> str:
    """Return the cell of one item as HTML, in which Markdown is not read."""
    span = ' colspan="2"' if item.wide else ' width="50%"'
    picture = f'<img src="docs/images/gallery/{item.name}.jpg" alt="{html.escape(item.alt)}" width="100%">'
    code = f'<pre lang="{item.language}">{html.escape(item.code, quote=False)}</pre>'
    caption = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(item.caption, quote=False))
    return f'<td{span} valign="top"><b>{item.title}</b><br>{picture}\n{code}\n{caption}</td>'


def readme_table() -> str:
    """Return the gallery of README.md: two columns, wide pictures over both."""
    rows: list[list[Item]] = []
    for item in (item for item in ITEMS if item.readme):
        if item.wide or not rows or rows[-1][0].wide or len(rows[-1]) == 2:
            rows.append([])
        rows[-1].append(item)
    cells = ["<tr>" + "\n".join(map(readme_cell, row)) + "</tr>" for row in rows]
    return "\n".join([BEGIN, "<table>", *cells, "</table>", END])


def with_gallery(readme: str) -> str:
    """Return the text of README.md with the gallery in its place."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"README.md has no place for the gallery; expected the lines {BEGIN} and {END} once.")
    return pattern.sub(lambda _: readme_table(), readme)


INTRODUCTION = """\
# Gallery

*Made by `python docs/generate_gallery.py`; do not edit.*

A picture per question, and the code that draws it. Model and photo are those that come with the package, so that every
line runs as it stands, offline; where a line needs your own model or photos, the caption says what was used here.
In Python, `import clairvit as cv` comes first.
"""


def gallery_page() -> str:
    """Return docs/gallery.md."""
    sections = [
        f"## {item.title}\n\n![{item.alt}](images/gallery/{item.name}.jpg)\n\n{item.block}\n\n{item.caption}\n"
        f"[Read on]({item.page}).\n"
        for item in ITEMS
    ]
    more = (
        "## More pictures\n\n[Regions, detectors, neurons](targets.md) · [clips](models.md) · "
        "[a sweep over heads](intervene.md) · [the page in twelve states](web.md) · "
        "[scenes with known evidence](scenes.md) · [planted triggers](planted-truth-trigger.md) · "
        "[what goes wrong in the wild](known-issues-in-the-wild.md) · [radar charts of a paper](reproduce.md)\n"
    )
    return "\n".join([INTRODUCTION, *sections, more])


def main() -> None:
    """Draw the pictures that are asked for, all by default, and write the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(item.name for item in ITEMS)], metavar="NAME")
    parser.add_argument("--texts", action="store_true", help="draw nothing")
    arguments = parser.parse_args()
    for item in ITEMS:
        if not arguments.texts and (not arguments.names or item.name in arguments.names):
            if item.needs and item.needs not in os.environ:
                print(f"{item.name}: kept as it is, {item.needs} is not set", flush=True)
                continue
            path = draw(item)
            print(f"{path.relative_to(HERE.parent)}  {path.stat().st_size // 1000} kB", flush=True)
    PAGE.write_text(gallery_page(), encoding="utf-8")
    README.write_text(with_gallery(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
