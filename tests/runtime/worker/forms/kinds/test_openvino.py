from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.forms.kinds.test_onnx import IMAGES, encoder, scripted, small, texts
from tests.support.forms import Inputs, compared, subject_of
from tsx_runtime.worker.forms.kinds import known_forms

# Not importorskip, which would import them with their telemetry.
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("openvino", "nncf"))), reason="needs openvino and nncf"
)


@pytest.mark.parametrize(
    ("name", "make", "inputs", "bound"),
    [
        ("openvino", encoder, texts, 1e-5),
        ("openvino-bf16", scripted, IMAGES, 0.05),
        ("openvino-int8", scripted, IMAGES, 0.2),
    ],
)
def test_it_answers_as_the_model_does(
    name: str,
    make: Any,
    inputs: Inputs,
    bound: float,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if why := known_forms()[name].applies(subject_of(make(), inputs)):
        pytest.skip(why)
    assert compared(known_forms()[name], make, inputs, tmp_path).worst < bound
    assert "Statistics" not in capfd.readouterr().out
    assert "openvino_telemetry.main" not in sys.modules


def test_an_answer_is_not_overwritten_by_the_next_batch_or_another_thread(tmp_path: Path) -> None:
    model = compared(known_forms()["openvino"], scripted, IMAGES, tmp_path, sizes=(2,)).loaded.model
    with ThreadPoolExecutor(4) as pool, torch.inference_mode():
        batches = [torch.randn(4, 3, 9, 9) for _ in range(40)]
        answers = list(pool.map(model, batches))
        for batch, answer in zip(batches, answers, strict=True):
            torch.testing.assert_close(answer, small()(batch))
