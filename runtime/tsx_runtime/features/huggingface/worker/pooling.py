"""The layout of a directory of sentence-transformers, with the modules after the model.

`modules.json` lists the modules; the directory of each module has its configuration.
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.loader import own_file

# Keys of old configurations, which have no `pooling_mode`.
LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class SentenceLayout:
    """The modules that compute the vector of a text from the vectors of its tokens.

    Without modules.json, the vector of a text is the mean of its tokens' vectors, as in
    sentence-transformers.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        """Read the layout.

        Raises:
            LoadError: A module is not supported, or its files cannot be read.
        """
        self.modes = ["mean"]  # Vectors of several pooling modes are concatenated.
        self.steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self.normalizes = False
        for module in _read_json(directory / "modules.json") or []:
            path = own_file(directory / str(module.get("path", "")), directory)
            self._add_module(
                str(module.get("type", "")).rpartition(".")[2], directory, path, device
            )
        bert_config, config = (
            _read_json(directory / "sentence_bert_config.json") or {},
            _read_json(directory / "config_sentence_transformers.json") or {},
        )
        self.max_tokens: int | None = bert_config.get("max_seq_length")
        self.lower = bool(bert_config.get("do_lower_case"))
        self.prompts: Mapping[str, str] = config.get("prompts") or {}
        self.default_prompt: str | None = config.get("default_prompt_name")
        self.similarity = config.get("similarity_fn_name") or "cosine"

    def _add_module(self, kind: str, directory: Path, path: Path, device: torch.device) -> None:
        if kind == "Transformer":
            if path.resolve() != directory.resolve():
                raise LoadError(
                    f"The model of the sentence model lies in {path.name}/; it must lie beside"
                    " modules.json."
                )
        elif kind == "Pooling":
            self.modes = _read_pooling_modes(_read_json(path / "config.json") or {})
        elif kind == "Dense":
            self.steps.append(_load_dense(path, device))
        elif kind == "Normalize":
            self.normalizes = True
            self.steps.append(lambda vectors: nn.functional.normalize(vectors, dim=-1))
        elif kind != "Dropout":
            raise LoadError(
                f"modules.json has a module {kind!r}; Transformer, Pooling, Dense, Normalize and"
                " Dropout are known."
            )

    def vectors(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a vector for each row.

        Args:
            tokens: The output of the model's last layer, of shape (rows, tokens, size).
            mask: The attention mask, of shape (rows, tokens).
        """
        tokens = tokens.float()
        vectors = torch.cat([pool_tokens(mode, tokens, mask) for mode in self.modes], dim=-1)
        for step in self.steps:
            vectors = step(vectors)
        return vectors


def pool_tokens(mode: str, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the pooled vector of each row; rows must be padded on the right."""
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    if mode == "cls":
        return tokens[:, 0]
    if mode == "lasttoken":
        return tokens[torch.arange(len(tokens)), mask.sum(dim=1) - 1]
    if mode == "max":
        return tokens.masked_fill(weights == 0, float("-inf")).max(dim=1).values
    if mode == "weightedmean":
        weights = (
            weights
            * torch.arange(1, mask.shape[1] + 1, device=mask.device).to(tokens.dtype)[None, :, None]
        )
    count = weights.sum(dim=1).clamp(min=1e-9)
    return (tokens * weights).sum(dim=1) / (
        count.sqrt() if mode == "mean_sqrt_len_tokens" else count
    )


def _read_pooling_modes(config: Mapping[str, Any]) -> list[str]:
    if config.get("include_prompt") is False:
        raise LoadError(
            "The pooling leaves out the tokens of the prompt (include_prompt: false), which is not"
            " supported."
        )
    configured_modes = config.get("pooling_mode")
    modes = (
        [configured_modes]
        if isinstance(configured_modes, str)
        else configured_modes
        or [mode for key, mode in LEGACY_POOLING_KEYS.items() if config.get(key)]
    )
    if unknown := set(modes) - set(LEGACY_POOLING_KEYS.values()):
        raise LoadError(
            f"The pooling mode {', '.join(map(str, unknown))} is unknown; known are"
            f" {', '.join(LEGACY_POOLING_KEYS.values())}."
        )
    return list(modes) or ["mean"]


def _load_dense(path: Path, device: torch.device) -> nn.Module:
    from safetensors.torch import load_file  # a dependency of transformers

    config = _read_json(path / "config.json") or {}
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(
        "."
    )[2]
    activation = getattr(nn, name, None)
    if not isinstance(activation, type) or not issubclass(activation, nn.Module):
        raise LoadError(
            f"{path.name}/config.json has the activation {name!r}, which torch.nn does not have."
        )
    if not (path / "model.safetensors").is_file():
        raise LoadError(
            f"{path.name} has no model.safetensors: save the sentence model again with a current"
            " sentence-transformers."
        )
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    weights = load_file(path / "model.safetensors")
    layer.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    return nn.Sequential(layer, activation()).to(device).float().eval().requires_grad_(False)


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path.name} is not JSON: {error}") from error
