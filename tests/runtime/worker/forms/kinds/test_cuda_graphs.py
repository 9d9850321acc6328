"""CUDA graphs, of which one is captured for each batch size."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import SIZES, built, compared, loaded, tensor_inputs
from tests.support.recorded_graphs import use_recorded_graphs
from tsx_runtime.worker.forms.kinds import known_forms

GPU = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs(rows: int) -> Any:
    (batch,), _ = tensor_inputs(8)(rows)
    return (batch.to(GPU),), {}


def small(device: str = "cuda:0") -> nn.Module:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)).eval().to(device)
    )


def test_a_replay_pads_the_batch_and_keeps_earlier_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replay on the CPU, with a fake of CUDA's graphs."""
    use_recorded_graphs(monkeypatch)
    form, model = known_forms()["cuda-graphs"], small("cpu")
    loaded_form = compared(
        form, lambda: small("cpu"), tensor_inputs(8), tmp_path, sizes=(*SIZES, 32, 40)
    ).loaded
    ((first,), _), ((second,), _) = (tensor_inputs(8)(rows) for rows in (3, 4))
    with torch.inference_mode():
        first_result = loaded_form.model(first)
        assert torch.allclose(loaded_form.model(second), model(second))
        # Both calls used the same graph.
        assert torch.allclose(first_result, model(first))


@needs_gpu
def test_batches_are_replayed_and_larger_ones_run_in_the_archives_model(
    tmp_path: Path,
) -> None:
    comparison = compared(
        known_forms()["cuda-graphs"], small, inputs, tmp_path, sizes=(*SIZES, 40), device=GPU
    )
    assert comparison.worst < 1e-5


@needs_gpu
def test_results_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    form = known_forms()["cuda-graphs"]
    built(form, small(), inputs, tmp_path, device=GPU)
    graphs, model = loaded(form, small, tmp_path, device=GPU).model, small()
    wrong_results: list[int] = []

    def ask(rows: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            (batch,), _ = inputs(rows)
            if not all(torch.allclose(graphs(batch), model(batch), atol=1e-5) for _ in range(50)):
                wrong_results.append(rows)

    threads = [threading.Thread(target=ask, args=(rows,)) for rows in (3, 4, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong_results


def test_it_runs_only_on_gpus_and_needs_no_package() -> None:
    form = known_forms()["cuda-graphs"]
    assert (form.devices, form.missing()) == ({"cuda"}, None)
