"""Loads an eager model: a class from a model file, and weights from a second file."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.loader import classes_of, import_file

SHOWN = 5  # names in a message; a mismatch of the whole model would fill pages


def load_eager(model_file: Path, weights: Path, *, weights_only: bool) -> nn.Module:
    """On the CPU, its weights mapped from the file rather than copied."""
    state = read_weights(weights, weights_only=weights_only)
    if isinstance(state, nn.Module):
        return state
    if not isinstance(state, Mapping):
        raise LoadError(f"{weights.name} holds a {type(state).__name__}, not weights. Save it with torch.save(model.state_dict(), file).")
    model = new_model(model_file)
    fit_weights(model, state, weights.name, model_file.name)
    return model


def new_model(model_file: Path) -> nn.Module:
    """The only model class that the file defines, made without arguments."""
    if not model_file.is_file():
        raise LoadError(f"The model file {model_file.name} is not in the archive. Name it with --model-file when packing.")
    module = import_file(model_file, "The model file")
    classes = classes_of(module)
    models = [kind for kind in classes if issubclass(kind, nn.Module)]
    if len(classes) == 1:
        kind = classes[0]
    elif len(models) == 1:
        kind = models[0]
    elif not classes:
        raise LoadError(f"The model file {model_file.name} defines no class. Define the model in it, as a torch.nn.Module.")
    else:
        names = ", ".join(found.__name__ for found in models or classes)
        raise LoadError(
            f"The model file {model_file.name} defines several classes ({names}), so the model class is ambiguous. "
            "Keep the model in it and import the others from another file."
        )
    if required := _required(kind):
        raise LoadError(
            f"Class {kind.__name__} of {model_file.name} cannot be created without arguments: it needs {', '.join(required)}. "
            "Give them defaults."
        )
    model: nn.Module = kind()
    return model


def _required(kind: type) -> list[str]:
    """The parameters without which it cannot be made."""
    parameters = inspect.signature(kind).parameters
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, given in parameters.items() if given.default is inspect.Parameter.empty and given.kind not in starred]


def read_weights(path: Path, *, weights_only: bool) -> Any:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError  # here: most models do not come as safetensors
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise LoadError(f"{path.name} cannot be read as safetensors: {error}. Copy or download it again.") from error
    try:
        zipped = path.open("rb").read(2) == b"PK"  # torch before 1.6 wrote another format, which cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipped)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise LoadError(f"{path.name} cannot be read: {error}") from error
        raise LoadError(
            f"{path.name} holds more than weights, and loading it would run code from it ({_refused(error)}). "
            "Save it with torch.save(model.state_dict(), file), or, if you trust it, set `weightsOnly: false` in model-config.yaml."
        ) from error


def _refused(error: Exception) -> str:
    """Torch's message is a page; the first sentence that names something is what matters."""
    for sentence in str(error).replace("\n", " ").split(". "):
        if "GLOBAL" in sentence or "global" in sentence:
            return " ".join(sentence.split())[:200]
    return str(error).strip().partition("\n")[0][:200]


def fit_weights(model: nn.Module, state: Mapping[str, Any], weights: str, model_file: str) -> None:
    """Put the weights into the model without copying them; where they do not fit, say what differs."""
    expected = model.state_dict()
    cast = {
        name: value.to(expected[name].dtype)
        if isinstance(value, torch.Tensor) and name in expected and value.dtype != expected[name].dtype
        else value
        for name, value in state.items()
    }
    try:
        model.load_state_dict(cast, assign=True)
    except (RuntimeError, AttributeError, TypeError) as error:  # torch raises each of them for what is not a state dict
        text = differences(expected, state)
        if text:
            raise LoadError(f"{weights} does not fit {model_file}: {text}") from None  # torch's traceback says the same, at length
        raise LoadError(f"{weights} does not fit {model_file}: {error}") from error


def differences(expected: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> str:
    """In words and short: keys that are missing, keys too many, shapes that differ, and what that hints at."""
    missing = [name for name in expected if name not in given]
    unexpected = [str(name) for name in given if name not in expected]
    shapes = [
        f"{name} is {tuple(given[name].shape)} in the file and {tuple(value.shape)} in the model"
        for name, value in expected.items()
        if isinstance(given.get(name), torch.Tensor) and given[name].shape != value.shape
    ]
    found = [
        f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for what, names in (("missing keys", missing), ("unexpected keys", unexpected), ("shapes that differ", shapes))
        if names
    ]
    return ". ".join(found) + _hint(unexpected, given) if found else ""


def _hint(unexpected: list[str], given: Mapping[str, Any]) -> str:
    if unexpected and all(name.startswith("module.") for name in unexpected):
        return ". The keys begin with 'module.', as DataParallel writes them: save model.module.state_dict() instead"
    for name in ("state_dict", "model_state_dict", "model"):
        if isinstance(given.get(name), Mapping):
            return f". The file is a training checkpoint: save its entry {name!r} alone"
    return ""
