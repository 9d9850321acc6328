"""Functions in the forms that Python allows, and types of pydantic, in a worker without a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_model import a_context, a_served_model, answers_of
from tsx_archiver import plan_archive
from tsx_archiver.python_file import PythonFileFacts
from tsx_cli.archive.directory import as_directory
from tsx_cli.archive.python_files.models import find_models
from tsx_cli.archive.python_files.spec import python_file_spec
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.features.python_files.worker.handler import PythonFileHandler
from tsx_runtime.settings.schema import Settings
from tsx_runtime.wire import request_meta
from tsx_runtime.worker.codecs.envelopes import KServeEnvelope
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.execution.batch import answer_batch, send_nowhere
from tsx_runtime.worker.handler_api.loader import Coroutines
from tsx_runtime.worker.handler_api.metrics import Metrics

METHOD = "class M:\n    {}\n    def predict(self, {}): return item"
IMPORTS = """
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Generic, Literal, NamedTuple, Optional, TypeVar
from pydantic import BaseModel, Field, RootModel
import numpy as np
T = TypeVar("T")
class Node(BaseModel):
    value: int
    children: "list[Node]"
    following: "Optional[Node]" = None
class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(alias="livesLeft")
class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = "Rex"
class Color(Enum):
    RED = "red"
class Box(BaseModel, Generic[T]):
    item: T
class Point(NamedTuple):
    x: int
    y: int = 2
class Rows(RootModel[list[int]]): ...
"""

Load = Callable[..., PythonFileHandler]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads the model of a file, whose name must be new."""

    def load(code: str, envelope: str = "") -> PythonFileHandler:
        file = tmp_path / f"{tmp_path.name}.py"
        file.write_text(code)
        (model,) = find_models(file)
        facts = PythonFileFacts(file.name, model.target, model.is_batched, model.is_async)
        context = a_context(manifest=facts.as_manifest(), metrics=Metrics("m"))
        context.system_properties["model_dir"] = str(tmp_path)
        context.envelope = envelope
        handler = PythonFileHandler()
        Coroutines().finish(handler.initialize(context))
        return handler

    return load


def ask(handler: PythonFileHandler, *requests: Any, handle: Any = None) -> list[tuple[int, Any]]:
    """Return the status and the JSON of each request of a batch."""
    model = a_served_model(handle or handler.handle, handler, context=handler._context)
    bodies = [json.dumps(request).encode() for request in requests]
    return [(status, json.loads(body)) for status, _, body in answers_of(model, *bodies)]


@pytest.mark.parametrize(
    "code",
    [
        "def predict(item: int, /): return item",
        "def predict(item: int = 3): return item",
        "async def predict(item): return item",
        "class M:\n    def predict(this, batch: list[int], /): return batch",
        "class M:\n    @staticmethod\n    def predict(batch: list[int]): return batch",
        "class M:\n    @classmethod\n    async def predict(cls, batch: list[int]): return batch",
        "from typing import Sequence\ndef predict(batch: Sequence[int]): return batch",
        "def predict(batch: list): return batch",
        "from typing import Any\nasync def predict(batch: Any): return batch",
        "from __future__ import annotations\nclass M:\n    def predict(self, item: int): return item",
        METHOD.format("def load(self, device, retries=3): self.x = device", "item: int"),
        METHOD.format("async def load(self): self.x = 1", "item: int"),
        METHOD.format("__slots__ = 'model'", "item: int"),
        "from functools import cache\n@cache\ndef predict(item: int): return item",
    ],
)
def test_a_function_has_any_form_with_one_parameter(load: Load, code: str) -> None:
    assert ask(load(code), 4) == [(200, 4)]


def test_parameters_may_be_keywords_with_defaults(load: Load) -> None:
    handler = load("def predict(*, a: int, b: int = 2): return [a, b]")
    assert ask(handler, {"a": 1}, {"a": 1, "b": 1})[:2] == [(200, [1, 2]), (200, [1, 1])]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def predict(*args): ...", r"several with names; it is predict\(\*args\)"),
        ("def predict(a, **more): ...", "several with names"),
        ("def predict(): ...", "several with names"),
        ("def predict(*, item: int): ...", "several with names"),
        ("def predict(a: int, b: int, /): ...", "several with names"),
        ("def predict(item: 'Nope'): ...", "'Nope' is not defined"),
        ("class Own: ...\ndef predict(item: Own): ...", "Own"),
        ("import numpy\ndef predict(batch: numpy.ndarray): ...", "must be a list"),
        ("def predict(batch: int): ...", "must be a list"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_load(
    load: Load, code: str, reason: str
) -> None:
    with pytest.raises(LoadError, match=reason):
        load(code)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (METHOD.format("def load(self, device, more): ...", "item"), "'more'"),
        (METHOD.format("def __init__(self, path): ...", "item"), "'path'"),
    ],
)
def test_a_class_that_needs_more_arguments_does_not_load(
    load: Load, code: str, reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        load(code)


TYPES: dict[str, tuple[Any, Any]] = {
    "Node": ({"value": 1, "children": [{"value": 2, "children": []}]}, {"value": 1}),
    "Annotated[Cat | Dog, Field(discriminator='kind')]": (
        {"kind": "cat", "livesLeft": 9},
        {"kind": "cow"},
    ),
    "Cat": ({"kind": "cat", "livesLeft": 9}, {"kind": "cat", "lives": 9}),
    "list[Color]": (["red"], ["blue"]),
    "dict[str, datetime]": ({"a": "2026-01-31T12:00:00Z"}, {"a": "noon"}),
    "Box[int]": ({"item": 1}, {"item": "a"}),
    "Point": ([1, 2], ["a"]),
    "Rows": ([1, 2], ["a"]),
    "Optional[int]": (None, "a"),
}


@pytest.mark.parametrize("annotation", TYPES)
def test_types_of_pydantic_are_read_written_and_have_an_example(
    load: Load, annotation: str
) -> None:
    right, wrong = TYPES[annotation]
    handler = load(f"{IMPORTS}def predict(batch: list[{annotation}]): return batch")
    assert handler.signature is not None
    accepted, refused, example = ask(handler, right, wrong, handler.signature["example"])
    if isinstance(right, dict):
        assert (accepted[0], accepted[1] | right) == (200, accepted[1] | right)
    else:
        assert accepted == (200, right)
    assert refused[0] == 422
    assert example[0] == 200


def test_an_envelope_gives_the_instances_of_a_request(load: Load) -> None:
    handler = load(
        IMPORTS + "def predict(batch: list[Box[int]]) -> list[str]: return ['x'] * len(batch)",
        envelope="kserve",
    )
    boxes = [{"item": number} for number in range(3)]
    accepted, refused = ask(
        handler,
        {"instances": boxes},
        {"instances": [*boxes, {"item": "a"}]},
        handle=KServeEnvelope(handler.handle).handle,
    )
    assert accepted == (200, {"predictions": ["x", "x", "x"]})
    assert refused[0] == 422
    assert "int_parsing" in refused[1]["message"]


def test_a_tensor_of_texts_is_a_field_by_its_name(load: Load) -> None:
    """Call the handler as `row_of_tensors` does: the first tensor is also the body."""
    handler = load("def predict(text: str, top: int = 1): return text * top")
    text = bytearray(b"plain")
    for row in ({"text": text, "body": text}, {"data": b'{"text": "plain"}'}):
        assert handler._reader.read(row, "", {}) == {"text": "plain"}


@pytest.mark.anyio
@pytest.mark.usefixtures("processes")
async def test_a_version_without_workers_has_the_signature_of_its_last_one(tmp_path: Path) -> None:
    file = tmp_path / "lengths.py"
    file.write_text("def predict(item: str) -> int: return len(item)")
    with (
        python_file_spec(file) as (spec, _),
        as_directory(plan_archive(spec), copy=True) as directory,
    ):
        async with open_model(directory, Settings()) as version:
            await version.scale(0, 0)
            assert version.workers == []
            assert version.signature is not None
            assert version.signature.input == {"type": "string"}


def test_a_fault_in_a_validator_or_a_result_fails_its_request_alone(load: Load) -> None:
    handler = load(
        """
from pydantic import BaseModel, field_validator
class Item(BaseModel):
    n: int
    @field_validator("n")
    @classmethod
    def check(cls, n): return 1 // n
calls = []
def predict(batch: list[Item | str]):
    calls.append(1)
    return ["\\ud800" if item == "bad" else len(calls) for item in batch]
"""
    )
    answers = ask(handler, {"n": 1}, {"n": 0}, "bad", {"n": 1})
    assert [status for status, _ in answers] == [200, 500, 500, 200]
    # A retry would have called the function again.
    assert answers[0][1] == answers[3][1] == 1
    assert "ZeroDivisionError" in answers[1][1]["message"]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({"x": {"k" * 30_000: ["a"] * 90}}, id="a long key in each error"),
        pytest.param({"x": {"k" * 300_000: ["a"] * 1000}}, id="too many errors"),
        pytest.param({"kind": {"kind": "c" * 300_000}}, id="a value in a message"),
    ],
)
def test_the_errors_of_a_request_are_short(load: Load, request_: Any) -> None:
    handler = load(
        IMPORTS
        + "class Item(BaseModel):\n"
        + "    x: dict[str, list[int]] = {}\n"
        + "    kind: Annotated[Cat | Dog, Field(discriminator='kind')] | None = None\n"
        + "def predict(item: Item): return 1"
    )
    ((status, answer),) = ask(handler, request_)
    assert status == 422
    assert len(json.dumps(answer)) < 300_000


def test_an_error_has_no_input_that_is_no_json(load: Load) -> None:
    handler = load("def predict(item: list[str]): return item")
    assert ask(handler, [float("nan")]) == [
        (
            422,
            {
                "detail": [
                    {
                        "type": "string_type",
                        "loc": ["body", 0],
                        "msg": "Input should be a valid string",
                    }
                ]
            },
        )
    ]


def npy_of(shape: str) -> bytes:
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        ("np.ndarray", npy_of("(1000000000, 0)")),
        ("np.ndarray", npy_of("(((")),
        ("np.ndarray", npy_of("(18446744073709551617,)")),
        ("np.ndarray", npy_of("(True,)")),
        ("Image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"),
        ("Image", b"no image"),
    ],
)
def test_hostile_files_are_refused(load: Load, annotation: str, body: bytes) -> None:
    handler = load(
        "import numpy as np\nfrom PIL.Image import Image\n"
        f"def predict(item: {annotation}): return 1"
    )
    model = a_served_model(handler.handle, handler, context=handler._context)
    ((status, _, answer),) = answers_of(model, body)
    (error,) = json.loads(answer)["detail"]
    assert (status, error["type"]) == (422, "value_error")
    assert "object at 0x" not in error["msg"]
    assert "on paths" not in error["msg"]  # Pillow would look for Ghostscript.


@pytest.mark.parametrize("nan", ["null", "literal"])
def test_arrays_within_a_typed_result_are_json(load: Load, nan: str) -> None:
    handler = load(
        "import numpy as np\n"
        "def predict(item: int) -> dict: return {'a': np.arange(2), 'b': np.float32(1.5)}"
    )
    handler._writer._nan = nan
    assert ask(handler, 1) == [(200, {"a": [0, 1], "b": 1.5})]


def test_a_datatype_that_is_no_text_is_refused(load: Load) -> None:
    handler = load("def predict(item: int): return item")
    tensor = {"name": "item", "datatype": ["INT64"], "shape": [1], "data": [1]}
    ((status, answer),) = ask(handler, {"inputs": [tensor]})
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "inputs"])


@pytest.mark.parametrize("annotation", ["", " -> list[torch.Tensor]"])
def test_a_device_that_is_lost_while_a_result_is_read_replaces_the_worker(
    load: Load, annotation: str
) -> None:
    code = """
import torch
class Lost(torch.Tensor):
    def tolist(self):
        raise RuntimeError("CUDA error: device-side assert triggered")
class M:
    def predict(self, batch: list[int])ANNOTATION:
        return [torch.ones(1).as_subclass(Lost) for _ in batch]
"""
    handler = load(code.replace("ANNOTATION", annotation))
    model = a_served_model(handler.handle, handler, decode=False)
    items = [(0, request_meta(f"id-{number}", b"", []), b"1") for number in range(2)]
    assert answer_batch(model, items, send_nowhere).device_lost
