"""The check of the settings of LoRA adapters that come from outside an archive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tsx_archiver.errors import CannotPack
from tsx_runtime.features.huggingface.lora import check_lora


def adapter(directory: Path, **settings: Any) -> Path:
    config = {"peft_type": "LORA", "r": 4, "bias": "none", "init_lora_weights": True, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
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
        ({"lora_bias": True}, "lora_bias is True"),
        ({"megatron_config": {}, "megatron_core": "antigravity"}, "megatron_core is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"r": 1 << 30}, "its ranks are"),
        ({"rank_pattern": {"q_proj": 5000}}, "its ranks are"),
        ({"r": "4"}, "its ranks are"),
        ({"rank_pattern": [4]}, "its ranks are"),
        ({"lora_alpha": "8"}, "its values of lora_alpha are"),
        ({"lora_alpha": float("nan")}, "its values of lora_alpha are"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "its values of lora_alpha are"),
    ],
)
def test_other_types_and_settings_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotPack, match=reason):
        check_lora(adapter(tmp_path, **settings))
