"""The tables of docs/configuration.md say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tsx_archiver.configkeys import TORCHSERVE_KEYS, TSX_KEYS
from tsx_archiver.modelconfig import ModelConfig
from tsx_runtime.settings import Settings

ROOT = Path(__file__).parents[2]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def settings_table() -> str:
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "not set" if field.default is None else f"`{json.dumps(field.default)}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines)


def test_table_of_settings_is_that_of_the_code() -> None:
    assert settings_table() in CONFIGURATION, f"put this table into docs/configuration.md:\n{settings_table()}"


def test_keys_of_the_model_configuration_exist() -> None:
    named = {key for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", CONFIGURATION, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    known = {key.name for key in (*TORCHSERVE_KEYS, *TSX_KEYS)}
    assert {"minWorkers", "batchSize"} <= named - set(Settings.model_fields) <= known
    assert {key.name for key in TSX_KEYS} <= named, "what tsx adds is written nowhere else"
    assert {key.field for key in (*TORCHSERVE_KEYS, *TSX_KEYS)} <= set(ModelConfig.__dataclass_fields__)
