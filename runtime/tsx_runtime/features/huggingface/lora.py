"""The check of the settings of a LoRA adapter that a running model gets from outside its archive.

Further settings could change the base model, which others share, or load other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import ADAPTER_CONFIG, read_object

MAX_RANK = 1024  # PEFT allocates tensors of the rank before it reads those of the file.
_SETTINGS = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "r", "lora_alpha", "lora_dropout", "rank_pattern"),
    *("alpha_pattern", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "use_rslora", "use_dora"),
    *("bias", "init_lora_weights"),  # The worker refuses values that change the base model.
)
# Values of further settings that change nothing.
_NEUTRAL: Mapping[str, object] = {"megatron_core": "megatron.core", "qalora_group_size": 16}


def check_lora(directory: Path) -> None:
    """Check the settings of an adapter.

    Raises:
        CannotPack: The adapter could change more than the layers that it adds.
    """
    config = read_object(directory / ADAPTER_CONFIG)
    if config["peft_type"] != "LORA":
        raise CannotPack(f"its type is {config['peft_type']}, and only LORA is added to a model.")
    for name, value in config.items():
        if name not in _SETTINGS and value and value != _NEUTRAL.get(name):
            raise CannotPack(
                f"{name} is {value!r} in {ADAPTER_CONFIG}. Pack the adapter with the model."
            )
    ranks = _values(config, "r", "rank_pattern")
    if not all(isinstance(rank, int) and 0 < rank <= MAX_RANK for rank in ranks):
        raise CannotPack(f"its ranks are {ranks}; they are numbers from 1 to {MAX_RANK}.")
    alphas = _values({"lora_alpha": 8} | config, "lora_alpha", "alpha_pattern")
    if not all(isinstance(alpha, int | float) and isfinite(alpha) for alpha in alphas):
        raise CannotPack(f"its values of lora_alpha are {alphas}; they are numbers.")


def _values(config: Mapping[str, Any], name: str, pattern: str) -> list[Any]:
    """Return the value of a setting and those for some layers."""
    layers = config.get(pattern) or {}
    return [config.get(name), *(layers.values() if isinstance(layers, dict) else [layers])]
