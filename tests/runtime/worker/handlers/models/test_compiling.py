"""The setting `pt2` of model-config.yaml, which compiles eager models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tsx_archiver.metadata.compile_settings import compile_options
from tsx_runtime.worker.handlers.models.compiling import compile_model


@pytest.mark.parametrize(
    ("pt2", "options"),
    [
        (None, None),
        ("inductor", {"backend": "inductor"}),
        (
            {"compile": {"enable": True, "backend": "eager", "mode": "default"}},
            {"backend": "eager", "mode": "default"},
        ),
        ({"compile": {"enable": True}}, {}),
        ({"compile": {"enable": False, "backend": "eager"}}, None),
        ({"compile": {"backend": "eager"}}, None),
        ({"export": {"aot_compile": True}}, None),
        ({"backend": "eager", "fullgraph": True}, {"backend": "eager", "fullgraph": True}),
        (7, None),
    ],
)
def test_each_form_of_pt2_gives_arguments_of_torch_compile(
    pt2: Any, options: dict[str, Any] | None
) -> None:
    assert compile_options(pt2) == options


@pytest.mark.slow
@pytest.mark.parametrize(
    "pt2", [{"backend": "no_such_backend"}, {"backend": "eager", "no_such_option": 1}]
)
def test_a_model_that_cannot_be_compiled_runs_eagerly_with_a_warning(
    pt2: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Identity()
    assert compile_model(model, pt2) is model
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pt2", "text"),
    [
        ("inductor", "backend inductor"),
        (
            {"compile": {"enable": True, "backend": "eager", "dynamic": True}},
            "backend eager, dynamic True",
        ),
        ({"compile": {"enable": True}}, "the default backend"),
    ],
)
def test_the_compilation_of_a_model_is_logged(
    pt2: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "tsx.worker"):
        compile_model(torch.nn.Identity(), pt2)
    assert caplog.messages == [f"Compiled model with {text}"]


def test_only_eager_models_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    script = torch.jit.script(torch.nn.Identity())
    assert compile_model(script, "eager") is script
    assert "does not support" in caplog.text
