from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import SIZES, built, compared, loaded, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms

GPU = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs(rows: int) -> Any:
    (batch,), _ = tensor_inputs(8)(rows)
    return (batch.to(GPU),), {}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval().to(GPU)


@needs_gpu
def test_each_batch_size_is_replayed_and_larger_ones_go_to_the_archives_own_model(tmp_path: Path) -> None:
    found = compared(known_forms()["cuda-graphs"], small, inputs, tmp_path, sizes=(*SIZES, 40), device=GPU)
    assert found.worst < 1e-5


@needs_gpu
def test_results_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    form = known_forms()["cuda-graphs"]
    built(form, small(), inputs, tmp_path, device=GPU)
    graphs, model = loaded(form, small, tmp_path, device=GPU).model, small()
    wrong: list[int] = []

    def ask(rows: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            (batch,), _ = inputs(rows)
            if not all(torch.allclose(graphs(batch), model(batch), atol=1e-5) for _ in range(50)):
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(rows,)) for rows in (3, 4, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_runs_on_gpus_alone_and_needs_no_package() -> None:
    form = known_forms()["cuda-graphs"]
    assert (form.devices, form.missing()) == ({"cuda"}, None)
