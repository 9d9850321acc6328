"""Explanations of a model's outputs by Captum, the extra `explain` (https://captum.ai/api)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tsx_runtime.worker.exceptions import PredictionException, describe_error

# Steps of integrated gradients: as in TorchServe, and over words, where a step costs little.
INPUT_STEPS, TOKEN_STEPS = 15, 50


def captum() -> Any:
    """Return the module `captum.attr`.

    Raises:
        PredictionException: Captum is not installed.
    """
    try:
        import captum.attr  # an extra
    except ModuleNotFoundError as error:
        raise PredictionException(
            "Explanations need captum: pip install 'tsx-serve[explain]'", 501
        ) from error
    return captum.attr


def input_attributions(model: Any, inputs: Any, target: Any) -> torch.Tensor:
    """Return how much each input number contributes to a class, by integrated gradients from 0.

    Args:
        model: The model.
        inputs: A floating point tensor, rows first.
        target: The number of the class.

    Returns:
        A tensor of the shape of `inputs`.

    Raises:
        PredictionException: The inputs or the model have no gradients, or there is no such class.
    """
    attr = captum()
    if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
        kind = str(inputs.dtype) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise PredictionException(
            f"Only floating point inputs can be explained by gradients; these are {kind}: override"
            " get_insights.",
            501,
        )
    # A compiled model would be compiled again for gradients, and a form has none.
    model = getattr(model, "_orig_mod", model)
    column = _column(model, inputs[:1].detach().clone().requires_grad_(), target)
    result: torch.Tensor = attr.IntegratedGradients(lambda x: _scores(model(x))).attribute(
        inputs, target=column, n_steps=INPUT_STEPS
    )
    return result


def _scores(output: Any) -> Any:
    """Return one score for each class, averaged over pixels."""
    if isinstance(output, Mapping):
        output = output.get("out")
    return (
        output.flatten(2).mean(2)
        if isinstance(output, torch.Tensor) and output.ndim > 2
        else output
    )


def token_attributions(
    model: Any, numbers: torch.Tensor, offsets: torch.Tensor, target: Any
) -> torch.Tensor:
    """Return how much each token of one text contributes to a class.

    If the model has one EmbeddingBag, the method is integrated gradients over the embeddings.
    Otherwise it is the change of the output without the token.

    Args:
        model: The model.
        numbers: The numbers of the tokens, int64 of shape (tokens,).
        offsets: The offset of the text, int64 of shape (1,).
        target: The number of the class.

    Returns:
        A tensor of shape (tokens,).

    Raises:
        PredictionException: There is no such class.
    """
    attr = captum()
    model = getattr(model, "_orig_mod", model)
    column = _class_of(model(numbers, offsets), target)
    bags = (
        [module for module in model.modules() if isinstance(module, nn.EmbeddingBag)]
        if isinstance(model, nn.Module)
        else []
    )
    if len(bags) != 1:
        return _ablation_attributions(attr, model, numbers, offsets, column)
    embedded = bags[0].weight.detach()[numbers].unsqueeze(0)

    def forward(value: torch.Tensor) -> Any:
        with _use_embeddings(bags[0], value):
            return model(numbers, offsets)

    shares: torch.Tensor = attr.IntegratedGradients(forward).attribute(
        embedded, target=column, n_steps=TOKEN_STEPS
    )
    return shares.sum(dim=-1).squeeze(0)


@contextmanager
def _use_embeddings(bag: nn.EmbeddingBag, value: torch.Tensor) -> Iterator[None]:
    """Let the EmbeddingBag pool the embeddings `value`, of shape (texts, tokens, features)."""
    pools: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: value.sum(dim=1),
        "mean": lambda: value.mean(dim=1),
        "max": lambda: value.amax(dim=1),
    }
    bag.forward = lambda *args, **kwargs: pools[bag.mode]()  # type: ignore[method-assign]  # It is restored below.
    try:
        yield
    finally:
        del bag.forward


def _ablation_attributions(
    attr: Any, model: Any, numbers: torch.Tensor, offsets: torch.Tensor, column: int | None
) -> torch.Tensor:
    def forward(masks: torch.Tensor) -> torch.Tensor:
        full = model(numbers, offsets)
        remaining = (numbers[mask > 0] for mask in masks)
        return torch.cat(
            [model(part, offsets) if len(part) else torch.zeros_like(full) for part in remaining]
        )

    with torch.no_grad():
        shares: torch.Tensor = attr.FeatureAblation(forward).attribute(
            torch.ones(1, len(numbers), device=numbers.device), target=column
        )
    return shares.squeeze(0)


def _column(model: Any, inputs: torch.Tensor, target: Any) -> int | None:
    """Return the number of the class, after checking that the model can be explained.

    Raises:
        PredictionException: The model has no gradients, or there is no such class.
    """
    with torch.enable_grad():
        try:
            output = _scores(model(inputs))
        except RuntimeError as error:
            raise PredictionException(
                f"The model cannot be explained by gradients: {describe_error(error)}", 501
            ) from error
    column = _class_of(output, target)
    if not output.requires_grad:
        raise PredictionException(
            f"A {type(model).__name__} has no gradients, which explanations need: override"
            " get_insights.",
            501,
        )
    return column


def _class_of(output: Any, target: Any) -> int | None:
    """Return the number of the class, or None for a model with one number for each row.

    Raises:
        PredictionException: `target` is not a class, or the output is not a tensor.
    """
    if not isinstance(output, torch.Tensor):
        raise PredictionException(
            f"To explain a model that gives a {type(output).__name__}, not one tensor, override"
            " get_insights.",
            501,
        )
    try:
        column = int(target)
    except (TypeError, ValueError) as error:
        raise PredictionException(
            f"target must be the number of a class; it is {target!r}.", 400
        ) from error
    if output.ndim < 2:
        return None
    if not 0 <= column < output.shape[1]:
        raise PredictionException(
            f"target {column} is not a class of the model, which has {output.shape[1]} classes,"
            " counted from 0.",
            400,
        )
    return column
