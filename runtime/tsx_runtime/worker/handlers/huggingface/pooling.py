"""The layout of sentence-transformers: `modules.json` names what follows the model, and each module's directory has its configuration.

https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from tsx_runtime.worker.exceptions import LoadError

Step: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # vectors of sentences -> the same number of vectors

LEGACY = {  # how configurations said it before `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class SentenceLayout(NamedTuple):
    modes: tuple[str, ...]  # of pooling; the vectors of several stand one behind the other
    steps: tuple[Step, ...]
    normalizes: bool
    most_tokens: int | None
    lower: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    similarity: str

    def vectors(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of the model's last layer (rows, tokens, size)."""
        tokens = tokens.float()
        vectors = torch.cat([pooled(mode, tokens, mask) for mode in self.modes], dim=-1)
        for step in self.steps:
            vectors = step(vectors)
        return vectors


def pooled(mode: str, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    if mode == "cls":
        return tokens[torch.arange(len(tokens)), mask.argmax(dim=1)]
    if mode == "lasttoken":
        places = torch.arange(mask.shape[1], device=mask.device)
        return tokens[torch.arange(len(tokens)), (mask * places).argmax(dim=1)]
    if mode == "max":
        return tokens.masked_fill(weights == 0, float("-inf")).max(dim=1).values
    if mode == "weightedmean":
        weights = weights * torch.arange(1, mask.shape[1] + 1, device=mask.device).to(tokens.dtype)[None, :, None]
    count = weights.sum(dim=1).clamp(min=1e-9)
    return (tokens * weights).sum(dim=1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def read_layout(directory: Path, device: torch.device) -> SentenceLayout:
    """Without modules.json the mean of the tokens, as sentence-transformers has it. Raises LoadError."""
    modes: tuple[str, ...] = ()
    steps: list[Step] = []
    normalizes = False
    for module in _json(directory / "modules.json") or []:
        kind, place = str(module.get("type", "")).rpartition(".")[2], directory / str(module.get("path", ""))
        if kind == "Transformer":
            if place.resolve() != directory.resolve():
                raise LoadError(f"The model of the sentence model lies in {place.name}/; it must lie beside modules.json.")
        elif kind == "Pooling":
            modes = _modes(_json(place / "config.json") or {})
        elif kind == "Dense":
            steps.append(_dense(place, device))
        elif kind == "Normalize":
            normalizes = True
            steps.append(lambda vectors: nn.functional.normalize(vectors, dim=-1))
        elif kind != "Dropout":
            raise LoadError(f"modules.json has a module {kind!r}; Transformer, Pooling, Dense, Normalize and Dropout are known.")
    bert = _json(directory / "sentence_bert_config.json") or {}
    said = _json(directory / "config_sentence_transformers.json") or {}
    return SentenceLayout(
        modes or ("mean",),
        tuple(steps),
        normalizes,
        bert.get("max_seq_length"),
        bool(bert.get("do_lower_case")),
        said.get("prompts") or {},
        said.get("default_prompt_name"),
        said.get("similarity_fn_name") or "cosine",
    )


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    if config.get("include_prompt") is False:
        raise LoadError("The pooling leaves out the tokens of the prompt (include_prompt: false), which is not supported.")
    said = config.get("pooling_mode")
    modes = [said] if isinstance(said, str) else said or [mode for key, mode in LEGACY.items() if config.get(key)]
    if unknown := set(modes) - set(LEGACY.values()):
        raise LoadError(f"The pooling mode {', '.join(map(str, unknown))} is unknown; known are {', '.join(LEGACY.values())}.")
    return tuple(modes)


def _dense(place: Path, device: torch.device) -> Step:
    from safetensors.torch import load_file  # comes with transformers

    config = _json(place / "config.json") or {}
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    activation = getattr(nn, name, None)
    if not isinstance(activation, type) or not issubclass(activation, nn.Module):
        raise LoadError(f"{place.name}/config.json has the activation {name!r}, which torch.nn does not have.")
    if not (place / "model.safetensors").is_file():
        raise LoadError(f"{place.name} has no model.safetensors: save the sentence model again with a current sentence-transformers.")
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    weights = load_file(place / "model.safetensors")
    layer.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    return nn.Sequential(layer, activation()).to(device).float().eval().requires_grad_(False)


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path.name} is not JSON: {error}") from error
