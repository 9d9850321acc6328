"""PEFT adapters: several of one model, which share its memory; each request chooses one by `parameters.adapter`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from tsx_runtime.worker.exceptions import InvalidInput, LoadError, in_words


class Adapters:
    """Changes layers of the model in place; which adapter they apply is switched between two calls of the model."""

    def __init__(self, model: Any, directory: Path, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._applied: str | None = None
        self._peft: Any = None
        self._modules = {name: f"adapter{number}" for number, name in enumerate(self.names)}  # attributes of modules cannot have all names
        for name in self.names:
            self._add(model, name, directory / name, device)
        if self._peft is not None:
            self._peft.eval().requires_grad_(False)
            self._peft.base_model.disable_adapter_layers()

    def _add(self, model: Any, name: str, directory: Path, device: torch.device) -> None:
        try:
            from peft import PeftConfig, PeftModel  # an extra
        except ModuleNotFoundError as error:
            raise LoadError("The archive has PEFT adapters: pip install 'tsx-serve[peft]'") from error
        try:
            config = PeftConfig.from_pretrained(str(directory))
            if config.is_prompt_learning or config.is_adaption_prompt:
                raise LoadError(f"The adapter {name} is of the type {config.peft_type}; only those that change layers are served, as LoRA.")
            if getattr(config, "bias", "none") != "none":
                raise LoadError(
                    f"The adapter {name} was trained with bias={config.bias}, which changes the model that others share. Train it without."
                )
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(model, str(directory), self._modules[name], torch_device=str(device))
            else:
                self._peft.load_adapter(str(directory), self._modules[name], torch_device=str(device))
        except UnpicklingError as error:
            raise LoadError(
                f"The adapter {name} is a pickle that holds more than weights, so it is not read. Save it again as safetensors."
            ) from error
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise LoadError(f"The adapter {name} does not fit the model: {in_words(error)}") from error

    def check(self, name: str | None) -> None:
        """Raises InvalidInput."""
        if name is not None and name not in self.names:
            have = f"it has {', '.join(self.names)}" if self.names else "it has none"
            raise InvalidInput(f"The model has no adapter {name!r}; {have}.")

    def apply(self, name: str | None) -> None:
        """For the next calls of the model; None: the model itself."""
        if name == self._applied:
            return
        if name is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            if self._applied is None:
                self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(self._modules[name])
        self._applied = name
