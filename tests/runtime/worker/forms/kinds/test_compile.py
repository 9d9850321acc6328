"""Forms of torch.compile, whose machine code is compiled when a worker loads."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.runtime.worker.forms.kinds.subjects import IMAGES, images, texts, tied
from tests.support.forms import SIZES, built, compared, loaded, subject_of
from tsx_runtime.worker.forms.kinds import known_forms


@pytest.mark.usefixtures("processes")
def test_every_batch_size_runs_the_code_compiled_at_load(tmp_path: Path) -> None:
    built(known_forms()["compile"], images(), IMAGES, tmp_path)
    model = loaded(known_forms()["compile"], images, tmp_path).model
    with torch.inference_mode(), torch.compiler.set_stance("default"):
        for rows in (*SIZES, 64, 100):
            args, _ = IMAGES(rows)
            with torch.profiler.profile() as profile:
                answer = model(*args)
            assert any("Call CompiledFxGraph" in event.key for event in profile.key_averages()), (
                rows
            )
            torch.testing.assert_close(answer, images()(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(
    "LINE_COVERAGE" in os.environ,
    reason="line coverage adds calls to the product's code, which dynamo does not trace",
)
def test_the_bf16_form_takes_several_tensors_and_returns_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run dynamo without its compiler, which the tests of other forms cover."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    comparison = compared(known_forms()["compile-bf16"], tied, texts, tmp_path)
    assert 0 < comparison.worst < 0.02
    args, kwargs = texts(2)
    assert comparison.loaded.model(*args, **kwargs)["logits"].dtype == torch.float32


@pytest.mark.usefixtures("processes")
def test_it_needs_a_compiler() -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        reason = known_forms()["compile"].applies(subject_of(images(), IMAGES))
    cpp_builder.cpp_compiler_search.cache_clear()
    assert "no C++ compiler is found" in str(reason)
