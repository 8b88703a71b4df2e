"""Access to model hubs: fails fast when offline, silences the libraries' logging, never unpickles what it loads."""

from __future__ import annotations

import importlib
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from urllib.parse import urlparse

from clairvit.errors import Argument, ClairError, Message, ModelUnavailable, importing

TIMEOUT = 5.0  # seconds to wait for a hub's first answer
_LOGGERS = ("huggingface_hub", "timm", "transformers", "open_clip")


def extra(library: str, name: str, spec: str) -> ModuleType:
    """Return an imported optional library; raise ModelUnavailable with the extra to install."""
    with importing(f"'{spec}'", extra=name, error=ModelUnavailable):
        return importlib.import_module(library)


def hub_blocked() -> str | None:
    """Return why the Hugging Face hub cannot be reached, None if it can.

    Checked first because the libraries retry for half a minute per file before they fail.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # requests, httpx and offline mode raise different types, by version
        return f"{urlparse(constants.ENDPOINT).netloc} cannot be reached: {first_line(error)}"
    return None


def url_blocked(url: str) -> str | None:
    """Return why a file cannot be downloaded, None if its server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT):
            return None
    except urllib.error.HTTPError as error:
        return f"{urlparse(url).netloc} answered {error.code}"
    except OSError as error:
        return f"{urlparse(url).netloc} cannot be reached: {first_line(getattr(error, 'reason', error))}"


@contextmanager
def fetching(
    spec: str, blocked: str | None = None, *, component: str = "weights", local: bool = False
) -> Iterator[None]:
    """Turn every error of a library that loads weights inside the block into ModelUnavailable.

    Args:
        spec: The model's name, for the message.
        blocked: Why the hub cannot be reached: only what is cached on this machine is used. None if it can.
        component: What is loaded, for the message.
        local: The user's own folder: the network is not used.
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
        except Exception as error:  # timm, transformers, open_clip and their readers raise dozens of types
            if _is_download(error) and not local:
                raise not_downloaded(spec, component, blocked or first_line(error)) from error
            raise ModelUnavailable(
                f"'{spec}' could not be loaded ({type(error).__name__}: {first_line(error)}); check the name, use the "
                "built-in model 'pets', or build the module yourself and use cv.wrap(module, mean=, std=, size=)."
            ) from error


def not_downloaded(spec: str, component: str, reason: str) -> ModelUnavailable:
    """Return the error for a failed download, with what can be used instead."""
    random = Argument("pretrained", False)
    alternative = {
        "weights": Message("random weights (", random, ")"),
        "configuration": Message("a model type, which needs none ('hf:vit' with ", random, ")"),
    }.get(component, Message("no prompts"))
    return ModelUnavailable(
        f"The {component} of '{spec}' could not be downloaded ({reason}); use the built-in model 'pets', a file "
        "you have ('file:PATH.safetensors' with ",
        Argument("arch", "timm:NAME"),
        "), or ",
        alternative,
        ".",
    )


def abbreviated(names: Sequence[str], most: int = 6) -> str:
    """Return "a, b, c, …" for a message."""
    return (", ".join(names[:most]) + (", …" if len(names) > most else "")) or "none"


def first_line(error: object) -> str:
    """Return the first sentence of a library's message, at most 160 characters."""
    lines = str(error).strip().splitlines()
    sentence = (lines[0] if lines else type(error).__name__).split(". ")[0].rstrip(". ")
    return sentence if len(sentence) <= 160 else sentence[:157] + "…"


def _is_download(error: BaseException | None) -> bool:
    """Return whether a network failure is anywhere in the chain of causes."""
    while error is not None:
        library = type(error).__module__.split(".")[0]
        # LocalEntryNotFoundError, URLError and ConnectionError are all OSErrors; httpx has its own hierarchy
        if isinstance(error, OSError) or library in {"httpx", "httpx2", "requests", "urllib3", "huggingface_hub"}:
            return True
        if "Failed to download" in str(error):  # open_clip drops the cause
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def offline() -> Iterator[None]:
    """Set the hub library's offline mode inside the block and restore it afterwards."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def no_pickles() -> Iterator[None]:
    """Force weights_only in every torch.load inside the block: torchvision does not set it."""
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logging of timm, transformers, open_clip and huggingface_hub inside the block."""
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    # open_clip logs to the root logger itself, and logging.error() there would install a handler for good
    null_handler = logging.NullHandler()
    root.addHandler(null_handler)
    root.addFilter(_not_open_clip)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        root.removeFilter(_not_open_clip)
        root.removeHandler(null_handler)


def _not_open_clip(record: logging.LogRecord) -> bool:
    return "open_clip" not in record.pathname
