"""Explains a model's answers by Captum (the extra `explain`). https://captum.ai/api"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tsx_runtime.worker.exceptions import PredictionException, in_words

STEPS = 15  # of integrated gradients over an input, as in TorchServe
TOKEN_STEPS = 50  # over words, where a step costs little


def captum() -> Any:
    try:
        import captum.attr  # an extra
    except ModuleNotFoundError as error:
        raise PredictionException(
            "Explanations need captum: pip install 'tsx-serve[explain]'", 501
        ) from error
    return captum.attr


def input_attributions(model: Any, inputs: Any, target: Any) -> torch.Tensor:
    """How much each number of `inputs` (rows first, floating point) speaks for class `target`, by
    integrated gradients from zero.
    """
    attr = captum()
    if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
        kind = str(inputs.dtype) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise PredictionException(
            f"Only floating point inputs can be explained by gradients; these are {kind}: override"
            " get_insights.",
            501,
        )
    model = getattr(
        model, "_orig_mod", model
    )  # a compiled model would be compiled again for gradients, and a form has no gradients
    column = _column(model, inputs[:1].detach().clone().requires_grad_(), target)
    result: torch.Tensor = attr.IntegratedGradients(lambda x: _scores(model(x))).attribute(
        inputs, target=column, n_steps=STEPS
    )
    return result


def _scores(output: Any) -> Any:
    """One number a class; of a model that has one a class and pixel, their mean."""
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
    """How much each token of one text speaks for class `target`.

    By integrated gradients over the embeddings where the model has one EmbeddingBag; else by what
    the answer loses without the token.
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
        return _by_leaving_out(attr, model, numbers, offsets, column)
    embedded = bags[0].weight.detach()[numbers].unsqueeze(0)

    def forward(value: torch.Tensor) -> Any:
        with _given(bags[0], value):
            return model(numbers, offsets)

    shares: torch.Tensor = attr.IntegratedGradients(forward).attribute(
        embedded, target=column, n_steps=TOKEN_STEPS
    )
    return shares.sum(dim=-1).squeeze(0)


@contextmanager
def _given(bag: nn.EmbeddingBag, value: torch.Tensor) -> Iterator[None]:
    """The bag takes its embeddings from `value` (texts, tokens, features), not from its table."""
    pools: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: value.sum(dim=1),
        "mean": lambda: value.mean(dim=1),
        "max": lambda: value.amax(dim=1),
    }
    bag.forward = lambda *args, **kwargs: pools[bag.mode]()  # type: ignore[method-assign]  # for one call
    try:
        yield
    finally:
        del bag.forward


def _by_leaving_out(
    attr: Any, model: Any, numbers: torch.Tensor, offsets: torch.Tensor, column: int | None
) -> torch.Tensor:
    def forward(masks: torch.Tensor) -> torch.Tensor:
        whole = model(numbers, offsets)
        kept = (numbers[mask > 0] for mask in masks)
        return torch.cat(
            [model(rest, offsets) if len(rest) else torch.zeros_like(whole) for rest in kept]
        )

    with torch.no_grad():
        shares: torch.Tensor = attr.FeatureAblation(forward).attribute(
            torch.ones(1, len(numbers), device=numbers.device), target=column
        )
    return shares.squeeze(0)


def _column(model: Any, inputs: torch.Tensor, target: Any) -> int | None:
    """The class, once it is known that the model's answer to one row can be explained."""
    with torch.enable_grad():
        try:
            output = _scores(model(inputs))
        except RuntimeError as error:
            raise PredictionException(
                f"The model cannot be explained by gradients: {in_words(error)}", 501
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
    """None for a model that gives one number a row."""
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
