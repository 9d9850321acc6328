"""Models of SageMaker's PyTorch toolkit in a worker: user functions, defaults and batches."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.worker.conftest import Request, StartWorker, Worker, a_request
from tests.runtime.worker.handlers.conftest import Net

MODEL = """
    import json, torch

    calls = []

    class Sum(torch.nn.Module):
        def forward(self, x):
            calls.append(len(x))
            return x.sum(dim=-1, keepdim=True) {factor}

    def model_fn(model_dir):
        return Sum()

    def output_fn(prediction, accept):
        return json.dumps({{"answer": prediction.tolist(), "calls": list(calls)}})
"""
CUSTOM_PROGRAM = """
    import json, logging
    from pathlib import Path
    from helper import double  # a module in the same directory

    seen = []

    def pre_model_fn(model_dir):
        seen.append(logging.getLogger().level)

    def model_fn(model_dir, context):
        return {"dir": Path(model_dir).name, "model": context.model_name}

    def model_warmup_fn(model_dir, model):
        seen.append(model["model"])

    def input_fn(data, content_type):
        if content_type == "text/bad":
            raise ValueError("no such type")
        return [type(data).__name__, data if isinstance(data, str) else data.decode()]

    def predict_fn(data, model):
        if "boom" in data[1]:
            raise KeyError("boom")
        return [*data, double(2), *seen]

    def output_fn(prediction, accept, context):
        return json.dumps([prediction, accept]), "application/x-custom"
"""


def start(
    start_worker: StartWorker, program: str, *, independent: bool = False, **files: str | bytes
) -> Worker:
    program_file = {"code/inference.py": program} if program else {}
    layout = {"code": "code", "program": "inference.py" if program else ""}
    return start_worker(
        files={**program_file, **{name.replace("__", "/"): text for name, text in files.items()}},
        handler="sagemaker_toolkit",
        variables={"SAGEMAKER_CONTAINER_LOG_LEVEL": "10"},
        model_config={"independentRows": True} if independent else {},
        manifest={"model": {"modelName": "m"}, "sagemaker": layout},
    )


def typed_request(body: bytes, content_type: str = "application/json", accept: str = "") -> Request:
    return a_request(body, content_type, **({"Accept": accept} if accept else {}))


def ask(worker: Worker, *rows: Any) -> list[Any]:
    return worker.values(*map(a_request, rows))


def test_the_users_functions_are_called_as_the_toolkit_documents_them(
    start_worker: StartWorker,
) -> None:
    worker = start(
        start_worker, CUSTOM_PROGRAM, **{"code__helper.py": "def double(x):\n    return 2 * x\n"}
    )
    assert worker.loaded, worker.report
    first, second, third, fourth = worker.ask(
        typed_request(b"[1]", "application/json", "text/x"),
        typed_request(b"a", "application/octet-stream"),
        typed_request(b"a", "text/bad"),
        typed_request(b"boom", "text/csv"),
    )
    assert json.loads(first.body) == [["str", "[1]", 4, 10, "m"], "text/x"]
    assert first.headers["content-type"] == "application/x-custom"
    assert json.loads(second.body) == [["bytes", "a", 4, 10, "m"], "application/json"]
    assert (third.status, third.message) == (500, "input_fn failed: ValueError: no such type")
    assert (fourth.status, fourth.message) == (500, "predict_fn failed: KeyError: 'boom'")


def test_a_model_with_data_dependent_control_flow_is_not_batched(
    start_worker: StartWorker,
) -> None:
    worker = start(start_worker, MODEL.format(factor="* (-2 if bool((x < 0).any()) else 1)"))
    # Even after batches of positive rows, the next row may take the other branch.
    for _ in range(4):
        assert [answer["answer"] for answer in ask(worker, [[1.0, 1.0]], [[2.0, 2.0]])] == [
            [[2.0]],
            [[4.0]],
        ]
    assert [answer["answer"] for answer in ask(worker, [[1.0, 1.0]], [[-1.0, 2.0]])] == [
        [[2.0]],
        [[-2.0]],
    ]


@pytest.mark.parametrize("has_predict_fn", [False, True])
def test_independent_rows_of_a_batch_share_a_call(
    start_worker: StartWorker, has_predict_fn: bool
) -> None:
    predict = (
        "\n    def predict_fn(data, model):\n        return model(data)\n" if has_predict_fn else ""
    )
    worker = start(start_worker, MODEL.format(factor="") + predict, independent=True)
    rows = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], [[0.5, 0.5]]]
    # The handler runs the first request alone, to learn whether the output has a row per input row.
    first_calls = ask(worker, *rows)[0]["calls"]
    answers = ask(worker, *rows)
    assert [answer["answer"] for answer in answers] == [[[3.0]], [[7.0], [11.0]], [[1.0]]]
    assert answers[0]["calls"][len(first_calls) :] == [4]
    uneven_answers = ask(worker, [[1.0, 2.0]], [[1.0, 2.0, 3.0]])
    assert [answer["answer"] for answer in uneven_answers] == [[[3.0]], [[6.0]]]
    flat_answers = ask(worker, [1.0, 2.0], [3.0, 4.0])
    assert [answer["answer"] for answer in flat_answers] == [[3.0], [7.0]]


def test_a_request_that_fails_among_independent_rows_fails_alone(start_worker: StartWorker) -> None:
    program = """
        def model_fn(model_dir): return None
        def predict_fn(data, model):
            if bool((data < 0).any()):
                raise ValueError("negative")
            return data * 2
    """
    worker = start(start_worker, program, independent=True)
    good_answer, bad_answer = worker.ask(
        *[typed_request(body) for body in (b"[[1.0]]", b"[[-1.0]]")]
    )
    assert (good_answer.status, json.loads(good_answer.body)) == (200, [[2.0]])
    assert (bad_answer.status, bad_answer.message) == (
        500,
        "predict_fn failed: ValueError: negative",
    )


def test_batch_predict_fn_gets_the_inputs_of_a_batch_in_order(start_worker: StartWorker) -> None:
    program = """
        def model_fn(model_dir): return 10
        def input_fn(data, content_type): return int(data)
        def batch_predict_fn(inputs, model):
            return [model * value + len(inputs) for value in inputs]
    """
    worker = start(start_worker, program)
    answers = worker.ask(*[typed_request(text) for text in (b"1", b"no", b"3")])
    assert [answer.body for answer in answers if answer.status == 200] == [b"12", b"32"]
    assert answers[1].status == 500


def test_transform_fn_replaces_the_other_functions(start_worker: StartWorker) -> None:
    program = """
        def model_fn(model_dir): return 3
        def transform_fn(model, data, content_type, accept):
            return f"{model} {data} {content_type} {accept}"
    """
    [answer] = start(start_worker, program).ask(typed_request(b"x", "text/csv", "text/csv"))
    assert (answer.body, answer.headers["content-type"]) == (b"3 x text/csv text/csv", "text/csv")
    report = start(
        start_worker, program + "\n        def input_fn(data, content_type): return data\n"
    ).report
    assert "transform_fn and input_fn, which it replaces" in report["message"]


@pytest.fixture(scope="module")
def default_worker(start_shared_worker: StartWorker, model_bytes: dict[str, bytes]) -> Worker:
    """Start a worker with weights and no program."""
    return start(start_shared_worker, "", **{"model.pth": model_bytes["script.pt"]})


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


ROWS = np.array([[1.0, 2.0, 3.0], [0.5, -1.0, 0.25]], dtype=np.float32)
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "application/json": json.loads,
    "text/csv": lambda body: np.loadtxt(io.BytesIO(body), delimiter=","),
    "application/x-npy": lambda body: np.load(io.BytesIO(body)),
    "application/jsonlines": lambda body: [json.loads(line) for line in body.splitlines()],
}


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", json.dumps(ROWS.tolist()).encode()),
        ("text/csv; charset=utf-8", b"1,2,3\n0.5,-1,0.25\n"),
        ("application/x-npy", npy(ROWS)),
        ("application/x-npz", npz(ROWS)),
        ("application/jsonlines", b"[1, 2, 3]\n[0.5, -1, 0.25]\n"),
    ],
)
def test_every_input_and_output_format_gives_the_models_values(
    default_worker: Worker, net: Net, content_type: str, body: bytes
) -> None:
    with torch.inference_mode():
        expected = net(torch.from_numpy(ROWS)).numpy()
    answers = default_worker.ask(
        *[typed_request(body, content_type, accept) for accept in DECODERS]
    )
    answers += default_worker.ask(
        typed_request(body, content_type, "text/csv;q=0.01, image/png, */*;q=0.1")
    )
    # JSON Lines requests get JSON Lines responses by default.
    default_type = (
        "application/jsonlines" if content_type == "application/jsonlines" else "application/json"
    )
    assert [answer.headers["content-type"] for answer in answers] == [*DECODERS, default_type]
    # An answer's last digits depend on the size of the batch.
    for answer in answers:
        decoded = DECODERS[answer.headers["content-type"]](answer.body)
        np.testing.assert_allclose(np.array(decoded), expected, rtol=1e-4, atol=1e-6)


def test_the_defaults_refuse_unsupported_types_and_unreadable_bodies(
    default_worker: Worker,
) -> None:
    answers = default_worker.ask(
        typed_request(b"x", "image/png"),
        typed_request(b"{"),
        typed_request(b"a,b\n", "text/csv"),
        typed_request(json.dumps(ROWS.tolist()).encode(), accept="image/png"),
    )
    assert [answer.status for answer in answers] == [415, 400, 400, 415]
    assert "define input_fn in your program" in answers[0].message
    assert "define output_fn in your program" in answers[3].message


def test_the_error_lists_the_weights_files_if_there_are_several(start_worker: StartWorker) -> None:
    worker = start(
        start_worker, "def predict_fn(data, model): return data\n", **{"a.pt": b"", "b.pt": b""}
    )
    assert "(there is: a.pt, b.pt). Define model_fn(model_dir)." in worker.report["message"]


def test_a_code_directory_outside_the_model_is_refused(start_worker: StartWorker) -> None:
    layout = {"code": "..", "program": "inference.py"}
    worker = start_worker(
        handler="sagemaker_toolkit", manifest={"model": {"modelName": "m"}, "sagemaker": layout}
    )
    assert "'..' is refused" in worker.report["message"]
