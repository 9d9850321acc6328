"""A graph in the place of a handler's model: what looks at the model finds what it needs, and the original is loaded only then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import built, tensor_inputs
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.loading import FormModel
from tsx_runtime.worker.forms.signature import ModelCall, Signature
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.models.input_spec import input_specs
from tsx_runtime.worker.handlers.object_detector import _wants_list
from tsx_runtime.worker.handlers.steps.explaining import input_attributions


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture
def loads() -> list[nn.Module]:
    """The originals that were loaded."""
    return []


@pytest.fixture
def form(loads: list[nn.Module]) -> FormModel:
    """A graph without gradients, from exactly the model that it stands for."""
    model, inputs = small(), tensor_inputs(4)
    signature = Signature.of(model, [ModelCall(*inputs(rows), rows) for rows in (2, 3)])
    signature = signature._replace(requests=tuple(spec.as_json() for spec in input_specs(model)))
    graph: Callable[..., list[torch.Tensor]] = torch.no_grad()(lambda tensor: [model(tensor)])

    def reference() -> nn.Module:
        loads.append(model) if not loads else None
        return model

    return FormModel("onnx", graph, Signature.from_json(signature.as_json()), reference)


def test_requests_are_read_and_answered_without_the_original(form: FormModel, loads: list[nn.Module]) -> None:
    assert input_specs(form) == input_specs(small())
    assert not _wants_list(form)
    assert form.eval() is form.to("cpu") is form
    assert form(torch.ones(5, 4)).shape == form.forward(torch.ones(1, 4)).expand(5, 3).shape
    assert not loads


def test_gradients_are_the_originals(form: FormModel, loads: list[nn.Module]) -> None:
    pytest.importorskip("captum")
    row = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    torch.testing.assert_close(input_attributions(form, row, 1), input_attributions(small(), row, 1))
    assert loads


def test_a_call_that_the_graph_was_not_built_for_gets_the_originals_answer(form: FormModel, loads: list[nn.Module]) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(form(torch.ones(2, 3, 4)), small()(torch.ones(2, 3, 4)))
    assert loads


class EagerGraph(Form):
    """The model itself as a function of flat tensors."""

    def applies(self, subject: Subject) -> str | None:
        return None

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        model = small()
        return lambda tensor: [model(tensor)]


def test_an_original_that_is_loaded_within_a_request_can_be_explained_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("captum")
    form = EagerGraph("eager-graph", "eager")
    monkeypatch.setitem(known_forms(), form.name, form)
    built(form, small(), tensor_inputs(4), tmp_path)
    handler = BaseHandler()
    handler.device = torch.device("cpu")
    handler.context = SimpleNamespace(model_yaml_config={"forms": [form.name]}, system_properties={"model_dir": str(tmp_path)}, manifest={})
    handler.model = handler.in_form(small)
    assert (handler.form, handler.forms_passed_over) == (form.name, ())
    with torch.inference_mode():
        handler.model(torch.ones(2, 3, 4))
    row = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    torch.testing.assert_close(handler.get_insights(row, None, 1), input_attributions(small(), row, 1).tolist())
