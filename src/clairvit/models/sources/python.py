"""MODULE:ATTRIBUTE: a model in the user's own Python code, such as `mypackage.models:build` or `mymodels:net`."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

from torch import nn

from clairvit.errors import BadInput, ClairError, ModelUnavailable, UnknownName, did_you_mean
from clairvit.models.load_options import LoadOptions
from clairvit.models.model import Model
from clairvit.models.preprocess import NOT_GIVEN, for_size
from clairvit.models.wrap import with_activation, wrap
from clairvit.plugins import importable_from


def is_python_name(name: str) -> bool:
    """Return whether a name reads as MODULE:ATTRIBUTE, both dotted Python identifiers."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def build(request: LoadOptions) -> Model:
    """Return the model of MODULE:ATTRIBUTE, on its own device, in its own precision and mode.

    The attribute is an nn.Module, a cv.Model, or a callable that returns one when called without arguments.
    """
    if not request.pretrained:
        raise BadInput(
            f"pretrained=False was given for '{request.spec}', whose weights come from your own code; expected it "
            "with a named architecture. Draw random weights in the code itself."
        )
    with importable_from(os.getcwd()):
        value = _call_builder(_import_attribute(request.spec), request.spec)
    if isinstance(value, Model):
        preprocess = value.preprocess if request.size is None else for_size(value.preprocess, request.size)
        model = dataclasses.replace(
            value,
            name=request.name,
            labels=value.labels if request.labels is None else request.labels,
            preprocess=request.preprocessing.applied_to(preprocess),
            assumptions=value.assumptions if request.preprocessing == NOT_GIVEN else (),
        )
        return with_activation(model, request.activation)
    return wrap(
        value,
        name=request.name,
        labels=request.labels,
        size=request.size,
        activation=request.activation,
        **vars(request.preprocessing),
    )


def _import_attribute(spec: str) -> Any:
    """Return the object that MODULE:ATTRIBUTE names."""
    module_name, _, path = spec.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise _user_code_error(f"Importing '{module_name}' failed", spec, error) from error
        raise UnknownName(
            f"There is no Python module '{error.name}' for the model '{spec}'; looked in the current directory "
            f"{os.getcwd()} and in the installed packages. Change to the directory of {module_name.partition('.')[0]}"
            ".py, or install its package."
        ) from error
    except ClairError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise _user_code_error(f"Importing '{module_name}' failed", spec, error) from error
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            public = [name for name in dir(value) if not name.startswith("_")]
            raise UnknownName(
                f"The module '{module_name}' has no attribute '{part}'.{did_you_mean(part, public)} Expected the name "
                f"of a torch.nn.Module, a cv.Model or a function that returns one: '{module_name}:build'."
            ) from error
    return value


def _call_builder(value: Any, spec: str) -> nn.Module | Model:
    """Return the value if it is a model, else what it returns when called without arguments."""
    if isinstance(value, nn.Module | Model):
        return value
    if not callable(value):
        raise BadInput(
            f"'{spec}' is a {type(value).__name__}; expected a torch.nn.Module, a cv.Model, or a function without "
            "arguments that returns one."
        )
    try:
        model = value()
    except ClairError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise _user_code_error(f"Calling '{spec}' without arguments failed", spec, error) from error
    if not isinstance(model, nn.Module | Model):
        raise BadInput(
            f"'{spec}' returned a {type(model).__name__}; expected a torch.nn.Module or a cv.Model. Return the module "
            "itself."
        )
    return model


def _user_code_error(action: str, spec: str, error: Exception) -> ModelUnavailable:
    """Return the error for an exception in the user's own code."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return ModelUnavailable(
        f"{action} ({type(error).__name__}: {first}); expected a module that imports and gives a torch.nn.Module. Try "
        f'it yourself: python -c "import {spec.partition(":")[0]}".'
    )
