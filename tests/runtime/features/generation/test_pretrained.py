"""The files, task and precision of a Hugging Face model in an archive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tsx_runtime.features.generation.worker import pretrained
from tsx_runtime.features.generation.worker.pretrained import (
    PretrainedFiles,
    check_patterns,
    find_pretrained,
)
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics


def find(
    root: Path, config: dict[str, Any], packed: Mapping[str, Any] = {}, limits_pixels: bool = True
) -> PretrainedFiles:
    directory = root / "huggingface_model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    manifest, metrics = {"huggingface": packed}, Metrics("m")
    context = Context("m", str(root), manifest, 1, None, "0.12.0", limits_pixels, metrics, config)
    return find_pretrained(context, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "auto"),
        ({"precision": "bf16"}, "bfloat16"),
        ({"precision": "bf16", "huggingface": {"dtype": "fp32"}}, "float32"),
    ],
)
def test_the_precision_comes_from_the_model_or_the_archive(
    tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    assert find(tmp_path, config).dtype == dtype


def test_a_task_in_model_config_overrides_the_archives(tmp_path: Path) -> None:
    packed = {"task": "fill-mask", "adapters": ["polite"]}
    files = find(tmp_path, {"huggingface": {"task": "chat"}}, packed)
    assert (files.task, files.adapters) == (
        "text-generation",
        {"polite": tmp_path / "huggingface_model" / "adapters" / "polite"},
    )


@pytest.mark.parametrize("config", [{"precision": "fp8"}, {"huggingface": {"dtype": "fp8"}}])
def test_an_unknown_precision_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"'auto', 'fp32', 'fp16' or 'bf16'|auto, fp32, fp16, bf16"):
        find(tmp_path, config)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "((.*)+)+z"},
        {"exclude_modules": "((.*)+)+z"},
        {"rank_pattern": {"((.*)+)+z": 4}},
        {"alpha_pattern": {"((.*)+)+z": 4}},
        {"layers_pattern": ["((.*)+)+z"]},
    ],
)
def test_an_adapter_whose_patterns_take_too_long_is_refused(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MAX_PATTERNS_S", 1.0)
    with pytest.raises(LoadError, match="adapter bad has patterns"):
        check_patterns("bad", SimpleNamespace(**config), ["model.layers.0.self_attn.q_proj"] * 3)


@pytest.mark.parametrize("pattern", [r".*\.(q_proj|v_proj)$", "["])
def test_other_patterns_are_left_to_peft(pattern: str) -> None:
    check_patterns("good", SimpleNamespace(target_modules=pattern), ["model.layers.0.q_proj"])


@pytest.mark.parametrize(("limits_pixels", "max_pixels"), [(True, 9), (False, None)])
def test_the_limit_of_pixels_can_be_turned_off(
    tmp_path: Path, limits_pixels: bool, max_pixels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    find(tmp_path, {}, limits_pixels=limits_pixels)
    assert max_pixels == Image.MAX_IMAGE_PIXELS
