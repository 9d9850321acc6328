"""The formats of requests to the default handler; others are refused with an example."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tsx_runtime.worker.codecs.array_list import ListLike
from tsx_runtime.worker.codecs.v2_json import MalformedTensors
from tsx_runtime.worker.exceptions import BadRows, LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.models.input_spec import InputSpec, examples, input_specs
from tsx_runtime.worker.handlers.steps.tensor_requests import read_request
from tsx_runtime.worker.handlers.vision import VisionHandler

ROW = [0.5, -1.0, 0.25, 2.0]
IMAGE = torch.arange(784.0).reshape(1, 28, 28).tolist()


class Grey(nn.Module):
    """A model whose first layer determines the channels and whose last layer the pixels."""

    def __init__(self) -> None:
        super().__init__()
        # The layer that runs last is created first.
        self.last = nn.Linear(2 * 26 * 26, 3)
        self.first = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.first(x).flatten(1))
        return scores


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": (self.vectors(ids) * mask.unsqueeze(-1)).mean(1), "length": mask.sum(1)}


class Mean(nn.Module):
    """A model without layers that returns one number per batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2, 2).mean()


class Table(nn.Module):
    """A model that returns scores of the rows, and two constant numbers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": x.sum(1), "bounds": torch.tensor([10.0, 20.0])}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.meta = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, pixels: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        return self.pixels(pixels) + self.meta(meta)


NETS: dict[str, nn.Module] = {
    "linear": nn.Sequential(nn.Linear(4, 3)),
    "grey": Grey(),
    "words": Words(),
    "mean": Mean(),
    "two": Two(),
    "table": Table(),
    "double": nn.Linear(4, 3).double(),
}
for net in NETS.values():
    net.eval().requires_grad_(requires_grad=False)


def npy(value: Any) -> bytearray:
    file = io.BytesIO()
    np.save(file, value)
    return bytearray(file.getvalue())


def tensor(
    data: list[Any], shape: list[int], name: str = "x", datatype: str = "FP32"
) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


class NetHandler(BaseHandler):
    """The default handler with a model of this file."""

    def __init__(self, model: Any, envelope: str, config: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.device = model, torch.device("cpu")
        self.context = Context(
            "m", "/m", {"model": {"modelVersion": "1.0"}}, 8, None, "1", model_yaml_config=config
        )
        self.context.envelope = envelope

    def ask(self, *rows: Any, header: tuple[str, str] = ("x", "y")) -> list[Any]:
        self.context.begin([f"id\r\n\r\n{header[0]}: {header[1]}\r\n"] * len(rows))
        answers: list[Any] = self.handle(list(rows), self.context)
        return answers

    def predict(self, *bodies: Any) -> list[Any]:
        return self.ask(*({"body": body} for body in bodies))

    def refusals(self, *bodies: Any) -> dict[int, str]:
        return self.refused(*({"body": body} for body in bodies))

    def refused(self, *rows: Any) -> dict[int, str]:
        with pytest.raises(BadRows) as exc_info:
            self.ask(*rows)
        assert exc_info.value.error_code == 400
        return exc_info.value.faults


MakeHandler = Callable[..., NetHandler]


@pytest.fixture(scope="module")
def a_handler(tmp_path_factory: pytest.TempPathFactory) -> MakeHandler:
    directory = tmp_path_factory.mktemp("nets")

    def make(name: str, form: str = "eager", envelope: str = "", **config: Any) -> NetHandler:
        model: Any = NETS[name]
        if form == "exported":
            example = torch.zeros(2, 4) if name == "linear" else torch.zeros(1, 1, 28, 28)
            model = torch.export.export(
                model,
                (example,),
                dynamic_shapes=({0: torch.export.Dim("n")},) if len(example) > 1 else None,
            ).module()
        elif form != "eager":
            model = torch.jit.script(model)
            torch.jit.save(
                torch.jit.freeze(model) if form == "frozen" else model, directory / f"{name}.pt"
            )
            model = torch.jit.load(directory / f"{name}.pt")
        return NetHandler(model, envelope, config)

    return make


def scores_of(name: str, rows: Any) -> list[Any]:
    numbers: list[Any] = NETS[name](torch.tensor(rows)).tolist()
    return numbers


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected))


@pytest.mark.parametrize("form", ["eager", "script", "frozen", "exported"])
def test_one_or_several_rows_in_every_format_give_the_models_values(
    a_handler: MakeHandler, form: str
) -> None:
    handler, (scores,) = a_handler("linear", form), scores_of("linear", [ROW])
    text = json.dumps(ROW)
    for row in (
        {"body": ROW},
        {"body": {"data": ROW}},
        {"body": {"inputs": ROW}},
        {"data": bytearray(text.encode())},
        {"body": text},
        {"body": npy(ROW)},
        {"body": {"x": ROW}},
        ROW,
    ):
        assert_close(handler.ask(row)[0], scores)
    for row in (
        {"body": [ROW, ROW]},
        {"body": {"data": [ROW, ROW]}},
        {"body": {"inputs": [ROW, ROW]}},
        {"data": npy([ROW, ROW])},
        {"body": npy(np.array([ROW, ROW], ">f8"))},
    ):
        assert_close(handler.ask(row)[0], [scores, scores])
    (answer,) = handler.predict({"instances": [ROW, ROW]})
    assert_close(answer.pop("predictions"), [scores, scores])
    assert answer == {}


def test_scores_get_the_names_of_the_classes(a_handler: MakeHandler) -> None:
    handler = a_handler("linear")
    scores = scores_of("linear", [ROW])[0]
    handler.mapping = {"0": "cat", "1": "dog", "2": "eel"}
    named_scores = dict(zip(("cat", "dog", "eel"), scores, strict=True))
    for body, answer in (
        (ROW, named_scores),
        ([ROW, ROW], [named_scores] * 2),
        ({"instances": [ROW]}, {"predictions": [named_scores]}),
    ):
        assert handler.predict(body) == [answer]
    inputs = {"inputs": [tensor(ROW, [1, 4])]}
    assert handler.predict(inputs)[0]["outputs"][0]["data"] == scores


@pytest.mark.parametrize(
    "mapping", [{"0": "cat", "1": "dog"}, {"0": "cat", "1": "cat", "2": "dog"}, {}]
)
def test_class_names_are_ignored_unless_there_is_one_per_score(
    a_handler: MakeHandler, mapping: dict[str, str]
) -> None:
    handler = a_handler("linear")
    handler.mapping = mapping
    assert_close(handler.predict(ROW)[0], scores_of("linear", [ROW])[0])


def test_open_inference_tensors_get_open_inference_answers(
    a_handler: MakeHandler,
) -> None:
    handler, (scores,) = a_handler("linear"), scores_of("linear", [ROW])
    (answer,) = handler.predict(
        {"id": "7", "inputs": [tensor(ROW * 2, [2, 4])], "outputs": [{"name": "y"}]}
    )
    (output,) = answer.pop("outputs")
    assert answer == {"model_name": "m", "model_version": "1.0", "id": "7"}
    assert_close(output.pop("data"), scores * 2)
    assert output == {"name": "y", "shape": [2, 3], "datatype": "FP32"}
    array = np.array([ROW], "float32").view(ListLike)
    for row in (
        {"x": array, "body": array},
        tensor(ROW, [1, 4]),
        {"body": {"inputs": [tensor(ROW, [1, 4])], "parameters": {"binary_data_output": True}}},
    ):
        # The worker or the envelope later makes tensors of the result.
        (result,) = handler.ask(row)
        assert result.dtype == torch.float32
        assert_close(result.tolist(), [scores])


def test_requests_of_a_batch_may_differ_in_format_and_number_of_rows(
    a_handler: MakeHandler,
) -> None:
    handler, rows = a_handler("linear"), torch.randn(5, 4).tolist()
    row_answer, rows_answer, instances_answer = handler.predict(
        rows[0], rows[1:4], {"instances": rows[4:]}
    )
    assert_close(
        [row_answer, *rows_answer, *instances_answer["predictions"]], scores_of("linear", rows)
    )


@pytest.mark.parametrize("form", ["eager", "script", "frozen", "exported"])
def test_numbers_are_cast_to_the_models_dtype(a_handler: MakeHandler, form: str) -> None:
    handler, pixels = a_handler("grey", form), [[[row % 2] * 28 for row in range(28)]]
    for body in (
        pixels,
        [[[bool(pixel) for pixel in row] for row in pixels[0]]],
        npy(np.array(pixels, "uint8")),
    ):
        assert_close(
            handler.predict(body)[0], NETS["grey"](torch.tensor([pixels]).float())[0].tolist()
        )
    if form != "exported":
        assert (
            a_handler("double", form).predict([1, 2, 3, 4])[0]
            == NETS["double"](torch.tensor([1, 2, 3, 4]).double()).tolist()
        )


@pytest.mark.parametrize(
    ("form", "expected_example"),
    [
        ("eager", "[1, any, any]"),
        ("script", "[1, any, any]"),
        ("frozen", "[1, any, any]"),
        ("exported", "[1, 28, 28]"),
    ],
)
def test_the_error_for_an_invalid_request_has_a_valid_example(
    a_handler: MakeHandler, form: str, expected_example: str
) -> None:
    handler, image = a_handler("grey", form), b"\x89PNG\r\n\x1a\n"
    wrong_requests = [
        [1, 2],
        IMAGE[0],
        {"instances": IMAGE},
        [[1], [2, 3]],
        "text",
        None,
        {"a": "b"},
        {"instances": 3},
        [],
        {},
        image,
        bytearray(),
        npy(["a"]),
        bytearray(b"\x93NUMPY"),
        npy(ROW).replace(b"(4,), }            ", b"(1000000000000,), }"),
        npy(ROW).replace(b"(4,), }                   ", b"(99999999999999999999,), }"),
    ]
    for body in wrong_requests:
        ((position, text),) = handler.refusals(IMAGE, body).items()
        assert position == 1, body
        assert f"The model takes float32 rows of shape {expected_example}. Send JSON" in text, body
        assert text.endswith("Example: what python3 -c 'print([[[0]*28]*28])' prints."), body
    assert "a PNG image" in handler.refusals(image)[0]
    assert "complex numbers" in handler.refusals(npy(np.array(IMAGE, "complex64")))[0]
    command = re.search(r"python3 -c '(.*)'", text)
    assert command is not None
    with contextlib.redirect_stdout(io.StringIO()) as example:
        exec(command[1])
    assert command[0] == handler.describe_handle()["example"]
    assert len(handler.predict(bytearray(example.getvalue().encode()))[0]) == 3


def test_a_short_example_is_quoted_in_the_format_of_the_envelope(a_handler: MakeHandler) -> None:
    assert a_handler("linear").refusals([1])[0].endswith("or a .npy file. Example: [0, 0, 0, 0]")
    assert (
        a_handler("linear", envelope="kserve")
        .refused([1])[0]
        .endswith('Example: {"instances": [[0, 0, 0, 0]]}')
    )
    example = a_handler("linear", envelope="kservev2").describe_handle()["example"]
    assert json.loads(example) == {
        "inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]}]
    }


def test_input_shape_overrides_the_first_layers_shape(a_handler: MakeHandler) -> None:
    handler = a_handler("linear", input_shape=[None, 4])
    assert_close(handler.predict([ROW, ROW])[0], scores_of("linear", [ROW, ROW]))
    assert_close(handler.predict([[ROW, ROW]])[0], [scores_of("linear", [ROW, ROW])])
    message = handler.refusals(ROW)[0]
    assert "has the shape [4]. The model takes float32 rows of shape [any, 4]" in message
    assert handler.describe_handle() == {
        "inputs": [{"name": "input", "shape": [None, 4], "datatype": "float32", "example": [8, 4]}],
        "example": json.dumps([[0] * 4] * 8),
    }


def test_several_inputs_are_passed_by_name(a_handler: MakeHandler) -> None:
    handler, ids, mask = a_handler("words"), [1, 2, 3], [1, 1, 0]
    mean, length = (
        value.tolist()
        for value in NETS["words"](torch.tensor([ids]), torch.tensor([mask])).values()
    )
    expected = {"mean": mean[0], "length": length[0]}
    assert handler.predict({"mask": mask, "ids": ids}) == [expected]
    assert handler.ask({"ids": bytearray(b"[1, 2, 3]"), "mask": bytearray(b"[1, 1, 0]")}) == [
        expected
    ]
    assert handler.predict({"instances": [{"ids": ids, "mask": mask}] * 2}) == [
        {"predictions": [expected, expected]}
    ]
    (answer,) = handler.predict(
        {
            "inputs": [
                tensor(ids, [1, 3], "ids", "INT64"),
                tensor(mask, [1, 3], "mask", "INT64"),
            ]
        }
    )
    assert [(output["name"], output["datatype"]) for output in answer["outputs"]] == [
        ("mean", "FP32"),
        ("length", "INT64"),
    ]
    example = json.loads(handler.describe_handle()["example"])
    assert set(handler.predict(example)[0]["predictions"][0]) == {"mean", "length"}


def test_a_model_with_one_result_per_batch_runs_once_per_request(
    a_handler: MakeHandler,
) -> None:
    assert a_handler("mean").predict([[0, 0], [0, 0]], [[1, 1], [1, 1]]) == [
        0.0,
        1.0,
    ]


def test_a_constant_result_of_batch_size_is_not_split(
    a_handler: MakeHandler,
) -> None:
    expected = a_handler("table").predict([[1, 1]])
    handler = a_handler("table")
    for _ in range(2):
        assert handler.predict([[1, 1]], [[5, 5]])[0] == expected[0]


def test_a_model_without_layers_is_tried_with_a_row_and_with_rows(
    a_handler: MakeHandler,
) -> None:
    assert a_handler("mean").predict([[[1, 2], [3, 4]]]) == [2.5]
    # The error may come from the model, so it is not a client error.
    with pytest.raises(RuntimeError, match="shape"):
        a_handler("mean").predict([1, 2, 3])


class Labels(NetHandler):
    def postprocess(self, data: Any) -> list[Any]:
        return [int(row.argmax()) for row in data]


def test_a_step_of_a_subclass_gets_one_tensor_with_a_row_for_each_request(
    a_handler: MakeHandler,
) -> None:
    handler = Labels(NETS["linear"], "", {})
    assert handler.predict(ROW, [ROW]) == [int(NETS["linear"](torch.tensor(ROW)).argmax())] * 2
    assert handler.refusals([ROW, ROW])[0].startswith("The request has 2 rows; send one.")


def test_an_explanation_has_the_shape_of_the_row(a_handler: MakeHandler) -> None:
    pytest.importorskip("captum")
    (weights,) = a_handler("linear").ask({"body": ROW}, header=("explain", "True"))
    assert len(weights) == 4


def test_out_of_memory_is_not_reported_as_a_client_error(a_handler: MakeHandler) -> None:
    handler = a_handler("linear")

    def full(*inputs: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    handler.model = full
    with pytest.raises(torch.cuda.OutOfMemoryError):
        handler.predict(ROW, ROW)


class TwoInputs(nn.Module):
    """A model that uses its second input first."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Embedding(7, 2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.right(ids).sum(1)
        return embedded + self.left(torch.relu(x))


@pytest.mark.parametrize("freeze", [False, True])
def test_inputs_of_torchscript_have_the_shapes_of_their_layers(freeze: bool) -> None:
    script = torch.jit.script(TwoInputs().eval())
    x, ids = input_specs(torch.jit.freeze(script) if freeze else script)
    assert (x.name, x.shape, x.dtype) == ("x", (4,), torch.float32)
    assert (ids.name, ids.shape, ids.dtype) == ("ids", (None,), torch.int64)
    first = next(examples((x, ids)))
    assert [(example.name, example.shape) for example in first] == [("x", (4,)), ("ids", (8,))]


def test_the_error_for_a_text_sent_as_a_form_names_the_header() -> None:
    with pytest.raises(
        MalformedTensors, match=r"\('plain text'\) have no value.*content-type: text/plain"
    ):
        read_request({"plain text": bytearray()}, [InputSpec()])


def test_input_shape_may_have_shapes_of_several_inputs(a_handler: MakeHandler) -> None:
    assert a_handler("two")._example is None
    handler = a_handler("two", input_shape={"meta": [3], "pixels": [4]})
    assert json.loads(handler.describe_handle()["example"]) == {
        "instances": [{"pixels": [0] * 4, "meta": [0] * 3}]
    }
    assert len(handler.predict({"pixels": [0] * 4, "meta": [1] * 3})[0]) == 2
    message = handler.refusals({"pixels": [0] * 4, "meta": [1] * 5})[0]
    assert "the shape [5] for the input 'meta'" in message
    with pytest.raises(LoadError, match="names pix, but the model takes pixels, meta"):
        _ = a_handler("two", input_shape={"pix": [4]})._input_specs


@pytest.mark.parametrize("name", ["\ufffdPNG\x1a", "GIF89a\x01", "\ufffd"])
def test_the_error_does_not_echo_a_file_sent_as_a_form(a_handler: MakeHandler, name: str) -> None:
    row = {name: bytearray(), "x": bytearray(b"1")}
    for message in (a_handler("linear").refused(row)[0], refusal_of_image(row)):
        assert (
            name in message,
            "send it with -T FILE, or with --data-binary @FILE" in message,
        ) == (False, True)


def refusal_of_image(row: dict[str, bytearray]) -> str:
    with pytest.raises(BadRows) as exc_info:
        VisionHandler().preprocess([row])
    return exc_info.value.message
