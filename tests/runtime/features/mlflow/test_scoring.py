"""MLflow's models, whose answers must equal those of MLflow's scoring server."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlflow.onnx
import mlflow.pyfunc
import mlflow.pytorch
import mlflow.transformers
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.models import infer_signature
from mlflow.pyfunc.scoring_server import invocations
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, pipeline

from tests.support.served_model import a_context, a_served_model
from tsx_archiver.metadata.mlmodel import DIRECTORY, FILE
from tsx_runtime.features.mlflow.worker.pyfunc import HINT, MLflowPyfunc
from tsx_runtime.features.mlflow.worker.pytorch import MLflowPyTorch
from tsx_runtime.wire import request_meta
from tsx_runtime.worker.codecs.array_list import ListLike
from tsx_runtime.worker.exceptions import InvalidInput, LoadError
from tsx_runtime.worker.execution.batch import answer_batch, send_nowhere
from tsx_runtime.worker.handler_api.metrics import Metrics

JSON, CSV = "application/json", "text/csv"
ROWS = np.array([[1, 2, 3], [0, 0.5, 1]], dtype=np.float32)
TENSOR = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": ROWS.ravel().tolist()}
PIP = ["torch"]


class Adder(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # MLflow's is untyped
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]  # MLflow reads hints as a signature
        if (model_input["a"] < 0).any():
            raise ValueError("negative")
        return model_input["a"] + model_input["b"] * (params or {})["times"]


class Net(torch.nn.Module):
    """A network whose pickle contains the class, because workers lack this file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.layer(x))


# Classes of a notebook are in this module; they are pickled by value.
Net.__module__ = "__main__"


class Answer(NamedTuple):
    status: int
    data: Any


def link_files(source: Path, target: Path) -> Path:
    """Make a link to each file of a directory, as `tsx serve DIRECTORY` does."""
    for file in (path for path in source.rglob("*") if path.is_file()):
        link = target / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return target


@pytest.mark.parametrize(
    ("name", "kind"), [("adder", MLflowPyfunc), ("pickle", MLflowPyTorch), ("pt2", MLflowPyTorch)]
)
def test_a_directory_of_links_is_loaded(
    saved: dict[str, Path], tmp_path: Path, name: str, kind: type
) -> None:
    scorer = Scorer(kind, link_files(saved[name], tmp_path / "linked"))
    value = (
        {"dataframe_split": {"columns": ["a", "b"], "data": [[1.0, 2.0]]}}
        if name == "adder"
        else {"inputs": ROWS.tolist()}
    )
    assert scorer.ask(value).status == 200


class Scorer:
    """A handler with a loaded model, called like in a worker."""

    def __init__(self, kind: type, directory: Path) -> None:
        self.directory = directory / DIRECTORY
        self.context = a_context(manifest={"model": {}}, batch_size=8, metrics=Metrics("m"))
        self.context.system_properties["model_dir"] = str(directory)
        self.handler = kind()
        self.handler.initialize(self.context)
        takes_raw = getattr(self.handler, "takes_raw_bodies", False)
        self.model = a_served_model(
            self.handler.handle, self.handler, context=self.context, decode=not takes_raw
        )

    def batch(self, *requests: tuple[str | bytes, str]) -> list[Answer]:
        """Answer a batch of requests, which are pairs of body and content type."""
        items = []
        for body, kind in requests:
            meta = request_meta("id", b"", [(b"content-type", kind.encode())])
            items.append((0, meta, bytearray(body.encode() if isinstance(body, str) else body)))
        answers = answer_batch(self.model, items, send_nowhere).answers
        return [Answer(status, json.loads(bytes(body))) for status, _, body in answers]

    def ask(self, value: Any) -> Answer:
        return self.batch((json.dumps(value), JSON))[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of archives, by model."""
    torch.manual_seed(0)
    net = Net().eval()
    signature = infer_signature(ROWS, net(torch.from_numpy(ROWS)).detach().numpy())
    columns = pd.DataFrame({"a": [1.0], "b": [2.0]})
    directories = {
        name: tmp_path_factory.mktemp(name) for name in ("pickle", "pt2", "script", "adder", "onnx")
    }
    target = {name: str(directory / DIRECTORY) for name, directory in directories.items()}
    mlflow.pytorch.save_model(
        net,
        target["pickle"],
        signature=signature,
        pip_requirements=PIP,
        serialization_format="pickle",
    )
    mlflow.pytorch.save_model(
        net,
        target["pt2"],
        signature=signature,
        pip_requirements=PIP,
        serialization_format="pt2",
        input_example=ROWS,
    )
    script = torch.jit.trace(net, torch.from_numpy(ROWS))
    mlflow.pytorch.save_model(
        script,
        target["script"],
        signature=signature,
        pip_requirements=PIP,
        serialization_format="pickle",
    )
    added = infer_signature(columns, pd.Series([3.0]), params={"times": 1.0})
    mlflow.pyfunc.save_model(
        target["adder"], python_model=Adder(), signature=added, pip_requirements=["pandas"]
    )
    mlflow.onnx.save_model(_onnx(), target["onnx"], signature=signature, pip_requirements=PIP)
    return directories


def _onnx() -> Any:
    from onnx import TensorProto, helper

    shape = ["batch", 3]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "net", values[:1], values[1:]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def scorer(saved: dict[str, Path]) -> Callable[[str], Scorer]:
    @cache
    def load(name: str) -> Scorer:
        return Scorer(MLflowPyfunc if name in ("adder", "onnx") else MLflowPyTorch, saved[name])

    return load


def split(columns: Sequence[str], *rows: Sequence[Any]) -> dict[str, Any]:
    return {"dataframe_split": {"columns": list(columns), "data": [list(row) for row in rows]}}


TENSORS = [
    (json.dumps({"inputs": ROWS.tolist()}), JSON),
    (json.dumps({"instances": ROWS.tolist()}), JSON),
    (json.dumps(split("abc", *ROWS.tolist())), JSON),
    (json.dumps({"dataframe_records": [{"a": 1, "b": 2, "c": 3}]}), JSON),
]
COLUMNS = [
    (json.dumps({**split("ab", [1, 2], [3, 4]), "params": {"times": 2}}), JSON),
    (json.dumps({"dataframe_records": [{"a": 1, "b": 2}]}), JSON),
    (json.dumps({"inputs": {"a": [1.0], "b": [2.0]}}), JSON),
    (json.dumps({"instances": [{"a": 1.0, "b": 2.0}]}), JSON),
    ("a,b\n1,2\n", CSV),
]


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("pickle", TENSORS),
        ("pt2", TENSORS),
        ("script", TENSORS),
        ("onnx", TENSORS[:2]),
        ("adder", COLUMNS),
    ],
)
def test_every_request_format_gives_the_answer_of_mlflows_server(
    scorer: Callable[[str], Scorer], name: str, requests: list[tuple[str, str]]
) -> None:
    model = mlflow.pyfunc.load_model(str(scorer(name).directory))
    answers = scorer(name).batch(*requests)
    for (body, kind), answer in zip(requests, answers, strict=True):
        expected = json.loads(
            invocations(body, kind, model, model.metadata.get_input_schema()).response
        )
        assert answer.status == 200, answer
        assert answer.data.keys() == expected.keys() == {"predictions"}
        if name in ("adder", "onnx"):
            assert answer.data == expected
        else:
            np.testing.assert_allclose(
                answer.data["predictions"], expected["predictions"], rtol=1e-6
            )


def test_a_transformers_pipeline_gives_the_answer_of_mlflows_server(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"])
    )
    config = BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    classifier = pipeline(
        "text-classification",
        model=BertForSequenceClassification(config).eval(),
        tokenizer=tokenizer,
    )
    signature = infer_signature("good film", [{"label": "LABEL_0", "score": 0.5}])
    mlflow.transformers.save_model(
        classifier,
        str(tmp_path / DIRECTORY),
        signature=signature,
        pip_requirements=["transformers"],
    )
    scorer = Scorer(MLflowPyfunc, tmp_path)
    model = mlflow.pyfunc.load_model(str(tmp_path / DIRECTORY))
    for body in (
        '{"inputs": ["good film", "bad"]}',
        '{"inputs": "bad film"}',
        '{"dataframe_split": {"columns": [0], "data": [["good"]]}}',
    ):
        expected = json.loads(
            invocations(body, JSON, model, model.metadata.get_input_schema()).response
        )
        assert scorer.batch((body, JSON)) == [Answer(200, expected)]


def test_requests_share_a_call_and_an_invalid_one_fails_alone(
    scorer: Callable[[str], Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = scorer("pickle"), list[int]()
    network = model.handler.model
    monkeypatch.setattr(
        model.handler, "model", lambda rows: sizes.append(len(rows)) or network(rows)
    )
    good_requests = [{"inputs": ROWS.tolist()}, {"inputs": ROWS[:1].tolist()}]
    first, bad_answer, last = model.batch(
        *[
            (json.dumps(body), JSON)
            for body in (good_requests[0], {"inputs": [[1, 2]]}, good_requests[1])
        ]
    )
    assert 3 in sizes
    assert (first.status, bad_answer.status, last.status) == (200, 400, 200)
    assert [len(answer.data["predictions"]) for answer in (first, last)] == [2, 1]
    assert first.data["predictions"][0] == pytest.approx(last.data["predictions"][0])


@pytest.mark.parametrize(
    ("name", "request_", "reason"),
    [
        (
            "pickle",
            {"inputs": [[1, 2]]},
            r"shape \[1, 2\]. The model takes .* shape \[3\]",
        ),
        ("pickle", {"inputs": [["a", 2, 3]]}, "cannot be read as numbers"),
        ("pickle", {"inputs": {"a": [1], "b": [1, 2]}}, "takes 1 inputs|The model takes float32"),
        ("pickle", {"inputs": {"a": [1], "b": 2}}, "takes 1 inputs|The model takes float32"),
        ("pickle", {"dataframe_split": 1}, '"columns" and "data"'),
        ("pickle", {"inputs": []}, "no rows|shape"),
        ("adder", split("a", [1]), r"Model is missing inputs \['b'\]"),
        ("adder", split("ab", ["x", 1]), "Failed to convert column a to type 'float64'"),
        ("adder", {"columns": []}, "exactly one of the input fields"),
        ("adder", [1], "Received a list"),
    ],
)
def test_a_request_that_violates_the_signature_is_refused(
    scorer: Callable[[str], Scorer], name: str, request_: Any, reason: str
) -> None:
    answer = scorer(name).ask(request_)
    assert (answer.status, answer.data["code"]) == (400, 400)
    assert re.search(reason, answer.data["message"])
    assert name == "pickle" or answer.data["error_code"] in (
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
    )


def test_a_body_without_a_content_type_is_json(scorer: Callable[[str], Scorer]) -> None:
    rows = {"inputs": ROWS.tolist()}
    assert scorer("pickle").batch((json.dumps(rows), "application/octet-stream"))[0] == scorer(
        "pickle"
    ).ask(rows)
    table = split("ab", [1, 2])
    assert scorer("adder").batch((json.dumps(table), "application/x-www-form-urlencoded"))[
        0
    ] == scorer("adder").ask(table)


@pytest.mark.parametrize(
    "kind", ["application/vnd.apache.parquet", "application/x-parquet", "application/parquet"]
)
def test_parquet_has_three_names(scorer: Callable[[str], Scorer], kind: str) -> None:
    file = io.BytesIO()
    pd.DataFrame({"a": [1.0], "b": [2.0]}).to_parquet(file)
    assert scorer("adder").batch((file.getvalue(), kind))[0] == scorer("adder").ask(
        split("ab", [1, 2])
    )


def test_an_unknown_content_type_is_refused(scorer: Callable[[str], Scorer]) -> None:
    answer = scorer("adder").batch(("<a/>", "text/xml"))[0]
    assert (answer.status, answer.data["code"], answer.data["type"]) == (
        415,
        415,
        "BadRequestException",
    )
    assert "text/csv" in answer.data["message"]


def test_an_error_of_the_model_is_a_server_error(scorer: Callable[[str], Scorer]) -> None:
    answer = scorer("adder").ask(split("ab", [-1, 2]))
    assert (answer.status, "negative" in answer.data["message"]) == (500, True)


@pytest.mark.parametrize(
    "body", [{"inputs": ROWS.tolist()}, {"instances": ROWS.tolist()}, {"inputs": [TENSOR]}]
)
def test_the_error_of_a_model_without_signature_suggests_one(tmp_path: Path, body: Any) -> None:
    mlflow.pytorch.save_model(
        Net().eval(), str(tmp_path / DIRECTORY), pip_requirements=PIP, serialization_format="pickle"
    )
    scorer = Scorer(MLflowPyfunc, tmp_path)
    answer = scorer.ask(body)
    assert (answer.status, "Send dataframe_split" in answer.data["message"]) == (400, True)
    assert (
        scorer.ask({"dataframe_split": {"columns": [0, 1, 2], "data": ROWS.tolist()}}).status == 200
    )


def test_a_model_of_columns_refuses_tensors_and_names_its_format(
    scorer: Callable[[str], Scorer],
) -> None:
    answer = scorer("adder").ask({"inputs": [TENSOR]})
    assert (answer.status, answer.data["message"].endswith(HINT)) == (400, True)
    with pytest.raises(InvalidInput, match="dataframe_split"):
        scorer("adder").handler.handle(
            [{"x": ROWS, "body": ROWS.view(ListLike)}], scorer("adder").context
        )


@pytest.mark.parametrize(("name", "kind"), [("pickle", MLflowPyTorch), ("adder", MLflowPyfunc)])
@pytest.mark.parametrize("outside", ["../outside", "/outside"])
def test_a_worker_loads_no_file_outside_the_model(
    saved: dict[str, Path], tmp_path: Path, name: str, kind: type, outside: str
) -> None:
    shutil.copytree(saved[name] / DIRECTORY, tmp_path / DIRECTORY)
    (tmp_path / DIRECTORY / "data").rename(tmp_path / "outside") if name == "pickle" else (
        tmp_path / "outside"
    ).mkdir()
    description = tmp_path / DIRECTORY / FILE
    key, path = (
        ("model_data: data", "model_data: ") if name == "pickle" else ("code: null", "code: ")
    )
    description.write_text(
        description.read_text().replace(
            key, path + (str(tmp_path) + outside if outside[0] == "/" else outside)
        )
    )
    with pytest.raises(LoadError, match=r"outside' of its flavors"):
        Scorer(kind, tmp_path)


def test_linked_code_of_a_model_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved["pickle"] / DIRECTORY, tmp_path / DIRECTORY)
    (tmp_path / DIRECTORY / "code").symlink_to(saved["adder"])
    description = tmp_path / DIRECTORY / FILE
    description.write_text(
        description.read_text().replace("model_data: data", "model_data: data\n    code: code")
    )
    with pytest.raises(LoadError, match="'code' is refused"):
        Scorer(MLflowPyTorch, tmp_path)


def test_a_handler_describes_the_inputs_of_its_model(scorer: Callable[[str], Scorer]) -> None:
    handler = scorer("pickle").handler
    assert handler.describe_handle()["inputs"] == [
        {"name": "", "shape": [3], "datatype": "float32", "example": [3]}
    ]
    model = scorer("adder")
    model.context.begin([request_meta("0", b"", [(b"describe", b"True")]).decode()])
    described = model.handler.handle([{"body": b""}], model.context)[0]
    assert [column["name"] for column in json.loads(described["signature"]["inputs"])] == ["a", "b"]


def test_errors_for_a_missing_model_or_wrong_handler_tell_what_to_do(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=f"no {DIRECTORY}/{FILE}. Pack the model"):
        Scorer(MLflowPyTorch, tmp_path)
    with pytest.raises(LoadError, match="use the handler mlflow_pyfunc"):
        Scorer(MLflowPyTorch, saved["adder"])
