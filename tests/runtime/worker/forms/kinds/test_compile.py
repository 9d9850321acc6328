from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.forms.kinds.subjects import images, texts, tied
from tests.support.forms import SIZES, Inputs, compared, subject_of, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms


@pytest.mark.parametrize(
    ("name", "make", "inputs", "worst"),
    [("compile", images, tensor_inputs(3, 9, 9), 1e-5), ("compile-bf16", tied, texts, 0.02)],
    ids=["images", "texts in bf16"],
)
def test_every_size_of_a_batch_runs_what_was_compiled_at_load(name: str, make: Any, inputs: Inputs, worst: float, tmp_path: Path) -> None:
    found = compared(known_forms()[name], make, inputs, tmp_path)
    assert found.worst < worst
    with torch.inference_mode(), torch.compiler.set_stance("default"):
        for rows in (*SIZES, 64, 100):
            args, kwargs = inputs(rows)
            with torch.profiler.profile() as profile:
                found.loaded.model(*args, **kwargs)
            assert any("Call CompiledFxGraph" in event.key for event in profile.key_averages()), rows


def test_it_needs_a_compiler() -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        reason = known_forms()["compile"].applies(subject_of(images(), tensor_inputs(3, 9, 9)))
    cpp_builder.cpp_compiler_search.cache_clear()
    assert reason == "no C++ compiler is found: install g++, or set CXX"
