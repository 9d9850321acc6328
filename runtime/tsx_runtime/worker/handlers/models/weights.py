"""The loading of eager models: a class from a model file, and weights from a second file."""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from tsx_runtime.worker.exceptions import LoadError, describe_error, shorten_and_escape
from tsx_runtime.worker.handler_api.loader import classes_of, import_file
from tsx_runtime.worker.handlers.models.sharing import share_with_file

logger = logging.getLogger("tsx.worker")

# The content of a state dict, a checkpoint, or a configuration.
Entries: TypeAlias = Mapping[str, Any]

NO_ARGUMENTS: Entries = {}
MAX_FAULT_CHARS = 150  # the limit of the text for each class in a message
MAX_DIFFERENCE_CHARS = 600  # a limit, since torch's message may be several pages long


def load_eager(
    model_file: Path,
    weights: Path | None,
    *,
    weights_only: bool,
    init_args: Entries = NO_ARGUMENTS,
    class_name: str | None = None,
) -> nn.Module:
    """Load a model on the CPU, with its weights mapped from their file.

    Without `weights`, the model has the initial weights of its class. If the model file has several
    classes, the only one that fits the weights is used.

    Raises:
        LoadError: There is no such class, or the weights do not fit; the message says what to do.
    """
    state = None
    if weights is not None:
        state = read_weights(weights, weights_only=weights_only)
        if isinstance(state, nn.Module):
            return state
        if not isinstance(state, Mapping):
            raise LoadError(
                f"{weights.name} holds a {type(state).__name__}, not weights. Save it with"
                " torch.save(model.state_dict(), file)."
            )
        state = _extract_state_dict(state, weights.name)

    classes = model_classes(model_file, class_name)
    if len(classes) == 1:
        check_arguments(classes[0], init_args, model_file.name)
    fitting_models, faults = [], []
    for kind in classes:
        try:
            model: nn.Module = kind(**init_args)
            if state is not None and weights is not None:
                fit_weights(
                    model, state, weights, model_file.name if len(classes) == 1 else kind.__name__
                )
            fitting_models.append(model)
        except Exception as error:  # the boundary to a user's code
            if len(classes) == 1:
                raise
            faults.append(f"{kind.__name__}: {describe_error(error)[:MAX_FAULT_CHARS]}")
    names = ", ".join(type(model).__name__ for model in fitting_models)
    if len(fitting_models) == 1:
        if len(classes) > 1:
            logger.info("of the classes of %s, %s is used", model_file.name, names)
        return fitting_models[0]
    reason = (
        f"the weights fit several ({names})"
        if fitting_models
        else f"the weights fit none of them ({'; '.join(faults)})"
    )
    if weights is None:
        reason = "there are no weights to choose by"
    raise LoadError(
        f"The model file {model_file.name} defines several classes "
        f"({', '.join(kind.__name__ for kind in classes)}), and {reason}. "
        f"Name one when packing: --model-file {model_file.name}:CLASS."
    )


def check_class(
    model_file: Path, weights: Path | None, config: Entries, class_name: str | None
) -> None:
    """Check that a model can be created.

    The weights are read only to choose among several classes.

    Raises:
        LoadError: The model cannot be created.
    """
    classes, init_args = model_classes(model_file, class_name), config.get("init_args") or {}
    if len(classes) == 1:
        check_arguments(classes[0], init_args, model_file.name)
    else:
        load_eager(
            model_file,
            weights,
            weights_only=config.get("weightsOnly") is not False,
            init_args=init_args,
        )


def _extract_state_dict(state: Entries, weights: str) -> Entries:
    """Return the state dict in a training checkpoint that has only one; or else the content."""
    names = state_dicts(state)
    if len(names) != 1:
        return state
    logger.info(
        "%s is a training checkpoint: the weights of its entry %r are used", weights, names[0]
    )
    state_dict: Entries = state[names[0]]
    return state_dict


def state_dicts(entries: Entries) -> list[str]:
    """Return the names of entries that are state dicts; none if this is a state dict itself."""
    if any(isinstance(value, torch.Tensor) for value in entries.values()):
        return []
    return [
        name
        for name, value in entries.items()
        if isinstance(value, Mapping)
        and value
        and all(isinstance(weight, torch.Tensor) for weight in value.values())
    ]


def model_classes(model_file: Path, class_name: str | None) -> list[type]:
    """Return the class with this name, or without a name all classes that may be the model.

    Raises:
        LoadError: The file or the class is missing, or the file cannot be imported.
    """
    if not model_file.is_file():
        raise LoadError(
            f"The model file {model_file.name} is not in the archive. Name it with --model-file"
            " when packing."
        )
    module = import_file(model_file, "The model file")
    classes = classes_of(module)
    if class_name is not None:
        named_class = getattr(module, class_name, None)
        if not inspect.isclass(named_class):
            names = ", ".join(kind.__name__ for kind in classes) or "none"
            raise LoadError(
                f"The model file {model_file.name} has no class {class_name}; its classes: {names}."
                " Name one of them."
            )
        return [named_class]
    if not classes:
        raise LoadError(
            f"The model file {model_file.name} defines no class. Define the model in it, as a"
            " torch.nn.Module."
        )
    return [kind for kind in classes if issubclass(kind, nn.Module)] or classes


def check_arguments(kind: type, init_args: Entries, model_file: str) -> None:
    """Check that a class can be created with these arguments.

    Raises:
        LoadError: The class requires other arguments.
    """
    signature = inspect.signature(kind)
    try:
        signature.bind(**init_args)
    except TypeError as error:
        example = ", ".join(
            f"{parameter.name}: ..."
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        )
        advice = (
            f"Set `init_args: {{{example}}}` in model-config.yaml"
            if example and not init_args
            else "Correct init_args in model-config.yaml"
        )
        arguments = f"init_args ({', '.join(init_args)})" if init_args else "no arguments"
        raise LoadError(
            f"Class {kind.__name__} of {model_file} cannot be created with {arguments}:"
            f" {error}. {advice}."
        ) from None


def read_weights(path: Path, *, weights_only: bool) -> Any:
    """Read a file of safetensors or of torch.save, mapped if possible.

    Raises:
        LoadError: The file cannot be read, or holds pickled code despite `weights_only`.
    """
    if path.suffix == ".safetensors":
        from safetensors import (
            SafetensorError,  # Imported here, since most models do not use safetensors.
        )
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise LoadError(
                f"{path.name} cannot be read as safetensors: {error}. Copy or download it again."
            ) from error
    try:
        # Files of torch before 1.6 are not zip files, and cannot be mapped.
        is_zip = path.open("rb").read(2) == b"PK"
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise LoadError(f"{path.name} cannot be read: {error}") from error
        raise LoadError(
            f"{path.name} holds more than weights, and loading it would run code from it"
            f" ({_refusal_reason(error)}). Save it with torch.save(model.state_dict(), file), or,"
            " if you trust it, set `weightsOnly: false` in model-config.yaml."
        ) from error


def _refusal_reason(error: Exception) -> str:
    """Extract from torch's long message the sentence about the refused code."""
    for sentence in str(error).replace("\n", " ").split(". "):
        if "GLOBAL" in sentence or "global" in sentence:
            return " ".join(sentence.split())[:200]
    return str(error).strip().partition("\n")[0][:200]


def fit_weights(model: nn.Module, state: Entries, weights: Path, model_file: str) -> None:
    """Put the weights into the model without copying them.

    Raises:
        LoadError: The weights do not fit; the message lists the differences.
    """
    model_state = model.state_dict()
    cast_state = {
        name: (
            value.to(model_state[name].dtype)
            if isinstance(value, torch.Tensor) and name in model_state
            else value
        )
        for name, value in state.items()
    }
    try:
        parameters = inspect.signature(model.load_state_dict).parameters.values()
        if any(
            parameter.name == "assign" or parameter.kind is parameter.VAR_KEYWORD
            for parameter in parameters
        ):
            model.load_state_dict(cast_state, assign=True)
        else:  # The model overrides this method, to rename keys for example. It copies the weights.
            model.load_state_dict(cast_state)
            share_with_file([*model.parameters(), *model.buffers()], weights)
    # torch raises any of these errors if the content is not a state dict.
    except (RuntimeError, AttributeError, TypeError) as error:
        text = shorten_and_escape(" ".join(str(error).split()), MAX_DIFFERENCE_CHARS)
        raise LoadError(
            f"{weights.name} does not fit {model_file}: {text}{_advice(state)}"
        ) from None


def _advice(state: Entries) -> str:
    if state and all(str(name).startswith("module.") for name in state):
        return (
            ". The keys begin with 'module.', as DataParallel writes them: save"
            " model.module.state_dict() instead"
        )
    if names := state_dicts(state):
        return (
            ". The file is a training checkpoint with several state dicts: save one of"
            f" {', '.join(map(repr, names))} alone"
        )
    return ""
