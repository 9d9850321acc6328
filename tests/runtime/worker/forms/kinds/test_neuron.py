"""Forms for AWS's accelerators, tested with a fake of torch-neuronx's documented interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.worker.forms.kinds.subjects import IMAGES, images
from tests.support.forms import compared, loaded, subject_of
from tests.support.recorders import documented
from tsx_runtime.worker.forms.kinds import known_forms, neuron


@pytest.fixture
def torch_neuronx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Install a fake of torch_neuronx, and a device."""
    (tmp_path / "neuron0").touch()
    monkeypatch.setattr(neuron, "DEVICE_DIRECTORY", tmp_path)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    yield from documented("torch_neuronx", monkeypatch)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("neuron", ["--auto-cast", "none"]),
        ("neuron-bf16", ["--auto-cast", "all", "--auto-cast-type", "bf16"]),
    ],
)
def test_a_module_is_compiled_per_size_and_other_batches_are_padded(
    torch_neuronx: Any, name: str, arguments: list[str], tmp_path: Path
) -> None:
    comparison = compared(
        known_forms()[name], images, IMAGES, tmp_path, sizes=(1, 2, 3, 17, 32, 40)
    )
    assert comparison.worst < 1e-5
    assert [call["shapes"] for call in torch_neuronx.CALLS] == [
        [(size, 3, 9, 9)] for size in (1, 2, 4, 8, 16, 32)
    ]
    assert all(call["compiler_args"] == arguments for call in torch_neuronx.CALLS)
    # A worker uses one core, so that other workers can use the others.
    assert os.environ["NEURON_RT_NUM_CORES"] == "1"


def test_a_machine_without_a_device_runs_the_archives_model(
    torch_neuronx: Any, tmp_path: Path
) -> None:
    form = known_forms()["neuron"]
    compared(form, images, IMAGES, tmp_path, sizes=(1,))
    (tmp_path / "neuron0").unlink()
    loaded_form = loaded(form, images, tmp_path)
    assert loaded_form.name == "reference"
    assert "(inf2, trn1)" in loaded_form.passed_over[0]
    assert form.applies(subject_of(images(), IMAGES)) == neuron.NO_DEVICE


def test_the_error_tells_how_to_install_the_missing_package() -> None:
    missing = known_forms()["neuron"].missing()
    assert "'torch-neuronx==2.9.*'" in str(missing)
    # A traced module takes and returns CPU tensors, so its device is the CPU.
    assert known_forms()["neuron"].devices == {"cpu"}
