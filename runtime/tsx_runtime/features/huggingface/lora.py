"""The check of a LoRA adapter that a running model gets from outside its archive.

PEFT sets any tensor that a file names, also those of the base model, which others share. Therefore
only known settings and the tensors of LoRA itself are accepted.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from tsx_archiver import load_json
from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_object

MAX_HEAD_BYTES, MAX_HEAD_VALUES = 16 << 20, 1_000_000
_TENSOR = re.compile(
    r"base_model\.model\..+\.lora_(?:(?:A|B)\.weight|embedding_(?:A|B)|magnitude_vector(?:\.weight)?)"
)
_SETTINGS = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "r", "lora_alpha", "lora_dropout", "rank_pattern"),
    *("alpha_pattern", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "use_rslora", "use_dora"),
)
# Values of further settings that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
}


def check_lora(directory: Path) -> None:
    """Check the settings and the tensors of an adapter.

    Raises:
        CannotPack: The adapter is damaged, or could change more than the layers that it adds.
    """
    config = read_object(directory / ADAPTER_CONFIG)
    if config["peft_type"] != "LORA":
        raise CannotPack(f"its type is {config['peft_type']}, and only LORA is added to a model.")
    for name, value in config.items():
        if name not in _SETTINGS and value and value not in _NEUTRAL.get(name, ()):
            raise CannotPack(f"{name} is {value!r} in {ADAPTER_CONFIG}. Pack it with the model.")
    try:
        shapes = _read_shapes(directory / ADAPTER_WEIGHTS)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CannotPack(f"{ADAPTER_WEIGHTS} is damaged: {error}.") from error
    if others := sorted(name for name in shapes if not _TENSOR.fullmatch(name)):
        raise CannotPack(f"{ADAPTER_WEIGHTS} has {others[0]}, which is no tensor of LoRA.")
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    largest = max((shape[0] for name, shape in shapes.items() if "_A" in name), default=0)
    if not all(isinstance(rank, int) and 0 < rank <= largest for rank in ranks):
        raise CannotPack(f"its ranks are {ranks}, and its largest tensor has rank {largest}.")


def _read_shapes(file: Path) -> dict[str, list[int]]:
    """Read the shapes of the tensors from the head of a safetensors file.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The head or the size is wrong.
    """
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        text = content.read(min(size, MAX_HEAD_BYTES))
    head = load_json(text, most_bytes=MAX_HEAD_BYTES, most_values=MAX_HEAD_VALUES)
    head.pop("__metadata__", None)
    shapes, end = {}, 0
    for name, tensor in head.items():
        shapes[name], (begin, stop) = tensor["shape"], tensor["data_offsets"]
        if not 0 < math.prod(shapes[name]) <= stop - begin:
            raise ValueError(f"{name} has no room for its shape")
        end = max(end, stop)
    if 8 + size + end != file.stat().st_size:
        raise ValueError("it is not complete")
    return shapes
