"""The way to the model hubs: quick to fail, quiet about it, and never unpickling what comes back."""

from __future__ import annotations

import importlib
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from clairvit.errors import ClairError, ModelUnavailable, install

PATIENCE = 5.0  # seconds to wait for a hub's first answer
_LOGGERS = ("huggingface_hub", "timm", "transformers", "open_clip")


def extra(library: str, name: str, spec: str) -> ModuleType:
    """Import an optional library, or say which extra brings it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ModelUnavailable(
            f"'{spec}' needs the package {library}, which cannot be imported ({error}); type: {install(name)}"
        ) from error


def hub_blocked() -> str | None:
    """Why the Hugging Face hub cannot be reached, None if it can.

    Asked first because the libraries would retry for half a minute, per file, before they admit it.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:  # requests, httpx and offline mode each have their own family, by version
        return f"{urlparse(constants.ENDPOINT).netloc} cannot be reached: {first_line(error)}"
    return None


def url_blocked(url: str) -> str | None:
    """Why this file cannot be downloaded, None if its server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE):
            return None
    except urllib.error.HTTPError as error:
        return f"{urlparse(url).netloc} answered {error.code}"
    except OSError as error:
        return f"{urlparse(url).netloc} cannot be reached: {first_line(getattr(error, 'reason', error))}"


@contextmanager
def fetching(spec: str, blocked: str | None = None, *, what: str = "weights", local: bool = False) -> Iterator[None]:
    """Inside, a library loads weights; whatever goes wrong comes out as one ModelUnavailable sentence.

    With `blocked` (a reason) only what is already on this machine is used: cached weights still load. `local` is for
    the user's own folders, where the network has no business at all.
    """
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(no_pickles())
        if blocked or local:
            stack.enter_context(offline())
        try:
            yield
        except ClairError:
            raise
        except Exception as error:
            if _is_download(error) and not local:
                raise not_downloaded(spec, what, blocked or first_line(error)) from error
            raise ModelUnavailable(
                f"'{spec}' could not be loaded ({type(error).__name__}: {first_line(error)}); check the name, use the "
                "built-in model 'pets', or build the module yourself and use cv.wrap(module, mean=, std=, size=)."
            ) from error


def not_downloaded(spec: str, what: str, reason: str) -> ModelUnavailable:
    last = {
        "weights": "random weights (pretrained=False)",
        "configuration": "a model type, which needs none ('hf:vit' with pretrained=False)",
    }.get(what, "no prompts")
    return ModelUnavailable(
        f"The {what} of '{spec}' could not be downloaded ({reason}); use the built-in model 'pets', a file you have "
        f"('file:PATH.safetensors' with arch='timm:NAME'), or {last}.",
        parameters={"arch": "timm:NAME", **({"pretrained": "False"} if "pretrained" in last else {})},
    )


def some(names: Sequence[str], most: int = 6) -> str:
    """'a, b, c …' for a sentence; the whole list is what `clairvit models` is for."""
    return (", ".join(names[:most]) + (", …" if len(names) > most else "")) or "none"


def first_line(error: Any) -> str:
    """The gist of a library's message: its first sentence, short enough for ours."""
    lines = str(error).strip().splitlines()
    gist = (lines[0] if lines else type(error).__name__).split(". ")[0].rstrip(". ")
    return gist if len(gist) <= 160 else gist[:157] + "…"


def _is_download(error: BaseException | None) -> bool:
    """Whether a network failure is anywhere in the chain of causes."""
    while error is not None:
        home = type(error).__module__.split(".")[0]
        # LocalEntryNotFoundError, URLError and ConnectionError are all OSErrors; httpx has its own family
        if isinstance(error, OSError) or home in {"httpx", "httpx2", "requests", "urllib3", "huggingface_hub"}:
            return True
        if "Failed to download" in str(error):  # open_clip drops the cause
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def offline() -> Iterator[None]:
    """The hub library's own offline switch, for the time being."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def no_pickles() -> Iterator[None]:
    """Make every torch.load a weights_only one: torchvision asks for the other kind."""
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' own logging off the user's screen; ours is one sentence."""
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    # open_clip logs to the root logger itself, and logging.error() there would install a handler for good
    stopper = logging.NullHandler()
    root.addHandler(stopper)
    root.addFilter(_not_open_clip)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        root.removeFilter(_not_open_clip)
        root.removeHandler(stopper)


def _not_open_clip(record: logging.LogRecord) -> bool:
    return "open_clip" not in record.pathname
