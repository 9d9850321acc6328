"""The check of LoRA adapters that come from outside an archive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import ADAPTER_WEIGHTS as WEIGHTS
from tsx_runtime.features.huggingface.lora import check_lora

save_file = pytest.importorskip("safetensors.numpy").save_file

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {
    f"{LAYER}.lora_A.weight": np.zeros((4, 8), np.float32),
    f"{LAYER}.lora_B.weight": np.zeros((8, 4), np.float32),
}


def adapter(directory: Path, tensors: dict[str, Any] = TENSORS, **settings: Any) -> Path:
    config = {"peft_type": "LORA", "r": 4, "bias": "none", "init_lora_weights": True, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / WEIGHTS)
    return directory


def test_lora_with_known_settings_is_accepted(tmp_path: Path) -> None:
    check_lora(
        adapter(
            tmp_path,
            lora_alpha=8,
            target_modules=["q_proj"],
            megatron_config=None,
            megatron_core="megatron.core",
            loftq_config={},
            rank_pattern={"q_proj": 4},
        )
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "its type is PREFIX_TUNING"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"megatron_config": {}, "megatron_core": "antigravity"}, "megatron_core is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"r": 1 << 30}, "its ranks are"),
        ({"rank_pattern": {"q_proj": 5}}, "its ranks are"),
        ({"r": "4"}, "its ranks are"),
        ({"rank_pattern": [4]}, "its ranks are"),
    ],
)
def test_other_types_and_settings_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotPack, match=reason):
        check_lora(adapter(tmp_path, **settings))


def test_a_tensor_of_the_base_model_is_refused(tmp_path: Path) -> None:
    name = f"{LAYER}.base_layer.weight"
    with pytest.raises(CannotPack, match=f"{name}, which is no tensor of LoRA"):
        check_lora(adapter(tmp_path, {**TENSORS, name: np.zeros((8, 8), np.float32)}))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    weights = adapter(tmp_path) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CannotPack, match="is damaged"):
        check_lora(tmp_path)
