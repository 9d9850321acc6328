"""A graph that replaces a handler's model, which is loaded only when code needs it."""

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
from tsx_runtime.worker.forms.signature import ModelCall, NoSignature, Signature
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.models.input_spec import input_specs
from tsx_runtime.worker.handlers.object_detector import _wants_list
from tsx_runtime.worker.handlers.steps.explaining import input_attributions


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture
def originals() -> list[nn.Module]:
    """Return the list to which loaded originals are added."""
    return []


@pytest.fixture
def form(originals: list[nn.Module]) -> FormModel:
    """Return a graph that replaces a model and has no gradients."""
    model, inputs = small(), tensor_inputs(4)
    signature = Signature.of(model, [ModelCall(*inputs(rows), rows) for rows in (2, 3)])
    signature = signature._replace(requests=tuple(spec.as_json() for spec in input_specs(model)))
    graph: Callable[..., list[torch.Tensor]] = torch.no_grad()(lambda tensor: [model(tensor)])

    def reference() -> nn.Module:
        originals.append(model) if not originals else None
        return model

    return FormModel("onnx", graph, Signature.from_json(signature.as_json()), reference)


def test_requests_are_read_and_answered_without_the_original(
    form: FormModel, originals: list[nn.Module]
) -> None:
    assert input_specs(form) == input_specs(small())
    assert not _wants_list(form)
    assert form.eval() is form.to("cpu") is form
    assert form(torch.ones(5, 4)).shape == form.forward(torch.ones(1, 4)).expand(5, 3).shape
    assert not originals


def test_explanations_equal_the_originals(form: FormModel, originals: list[nn.Module]) -> None:
    pytest.importorskip("captum")
    row = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    torch.testing.assert_close(
        input_attributions(form, row, 1), input_attributions(small(), row, 1)
    )
    assert originals


def test_calls_with_gradients_or_without_rows_run_in_the_original(
    form: FormModel, originals: list[nn.Module]
) -> None:
    form(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert originals
    assert form(torch.empty(0, 4)).shape == (0, 3)
    assert form.signature.tensors((torch.empty(0, 4),), {}) is None


def test_a_result_of_a_registered_class_is_rebuilt_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs_of_a_library.py").write_text(
        "from torch.utils import _pytree\n"
        "class Output(dict):\n    pass\n"
        "_pytree._register_pytree_node(Output, lambda it: (list(it.values()), list(it)), lambda values, keys: Output(zip(keys, values)),\n"
        "    serialized_type_name='outputs_of_a_library.Output')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model, inputs = small(), tensor_inputs(4)
    signature = Signature.of(
        lambda rows: {"logits": model(rows)}, [ModelCall(*inputs(rows), rows) for rows in (2, 3)]
    ).as_json()
    custom_signature = {
        **signature,
        "result_spec": signature["result_spec"].replace(
            "builtins.dict", "outputs_of_a_library.Output"
        ),
    }
    result = Signature.from_json(custom_signature).result([torch.ones(1)])
    assert (type(result).__name__, list(result)) == ("Output", ["logits"])
    with pytest.raises(NotImplementedError, match=r"of_no_library\.Output"):
        Signature.from_json(
            {
                **custom_signature,
                "result_spec": custom_signature["result_spec"].replace(
                    "outputs_of_a", "outputs_of_no"
                ),
            }
        )


def test_an_argument_that_is_only_sometimes_a_tensor_is_refused() -> None:
    def masked(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return rows if mask is None else rows * mask

    for masks in ((torch.ones(4), None), (None, torch.ones(4))):
        with pytest.raises(NoSignature, match="an argument of the model "):
            Signature.of(
                masked,
                [
                    ModelCall((torch.ones(rows, 4), mask), {}, rows)
                    for rows, mask in zip((2, 3), masks, strict=True)
                ],
            )


class EagerGraph(Form):
    """A form that runs the model as a function of flat tensors."""

    def applies(self, subject: Subject) -> str | None:
        return None

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        return {}

    def load(self, source: FormSource) -> Callable[..., Any]:
        model = small()
        return lambda tensor: [model(tensor)]


def test_an_original_loaded_in_a_request_can_give_explanations_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("captum")
    form = EagerGraph("eager-graph", "eager")
    monkeypatch.setitem(known_forms(), form.name, form)
    built(form, small(), tensor_inputs(4), tmp_path)
    handler = BaseHandler()
    handler.device = torch.device("cpu")
    handler.context = SimpleNamespace(
        model_yaml_config={"forms": [form.name]},
        system_properties={"model_dir": str(tmp_path)},
        manifest={},
    )
    handler.model = handler.in_form(small)
    assert (handler.form, handler.forms_passed_over) == (form.name, ())
    with torch.inference_mode():
        handler.model(torch.ones(2, 3, 4))
    row = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    torch.testing.assert_close(
        handler.get_insights(row, None, 1), input_attributions(small(), row, 1).tolist()
    )
