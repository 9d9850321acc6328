"""SageMaker's runtime without a process: variables, lines, layouts, jobs and many models."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver import ArchiveError
from tsx_runtime.api.management.describe import is_given_up
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.targets.image.model_discovery import (
    HANDLER,
    find_model,
    has_batch_function,
    toolkit_model,
)
from tsx_runtime.targets.sagemaker.app import parameters
from tsx_runtime.targets.sagemaker.batch_transform import (
    CSV,
    JSON_LINES,
    as_line,
    choose_format,
    join_lines,
    max_queued_lines,
    split_lines,
)
from tsx_runtime.targets.sagemaker.endpoint import read_settings
from tsx_runtime.targets.sagemaker.environment import read_environment
from tsx_runtime.targets.sagemaker.multi_model import Models, registry_name, size_of

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON_VALUES, max_size=8))
def test_any_answers_become_equivalent_json_lines(values: list[Any]) -> None:
    pretty = [json.dumps(value, indent=2).encode() for value in values]
    lines = join_lines(as_line(answer, JSON_LINES) for answer in pretty)
    assert [json.loads(line) for _, line in split_lines(lines)] == values


@given(st.text("a ,\r\n\t", max_size=30).map(str.encode))
def test_blank_lines_of_a_body_are_ignored(body: bytes) -> None:
    lines = enumerate(body.split(b"\n"), start=1)
    assert list(split_lines(body)) == [
        (number, line.rstrip(b"\r")) for number, line in lines if line.strip()
    ]


def test_millions_of_lines_are_split_lazily() -> None:
    assert next(split_lines(b"\n" * 5_000_000 + b"a\n" * 3_000_000)) == (5_000_001, b"a")
    assert choose_format(b"a," * 30_000 + b"text/csv", JSON_LINES) == JSON_LINES


@given(
    st.lists(
        st.lists(
            st.integers() | st.text(st.characters(exclude_categories=["C"])), min_size=1, max_size=4
        ),
        max_size=8,
    )
)
def test_rows_become_equivalent_csv_lines(rows: list[list[Any]]) -> None:
    lines = [as_line(json.dumps(row).encode(), CSV).decode() for row in rows]
    assert [list(next(csv.reader([line]), [""])) for line in lines] == [
        [str(field) for field in row] for row in rows
    ]


@pytest.mark.parametrize(
    ("answer", "as_csv", "as_json"),
    [
        (b"0.5", b"0.5", b"0.5"),
        (b"cat\n", b"cat", b'"cat"'),
        (b'{"a": [1, 2]}', b'"{""a"": [1, 2]}"', b'{"a": [1, 2]}'),
        (b"[1, [2, 3]]", b'1,"[2, 3]"', b"[1, [2, 3]]"),
        (b"two\nlines", b"two lines", b'"two\\nlines"'),
    ],
)
def test_an_answer_is_one_line_in_every_format(
    answer: bytes, as_csv: bytes, as_json: bytes
) -> None:
    assert as_line(answer, CSV) == as_csv
    assert as_line(answer, JSON_LINES) == as_json


def test_a_lone_surrogate_is_escaped_as_in_json() -> None:
    assert as_line(b'"\\ud800"', JSON_LINES) == b'"\\ud800"'
    assert as_line(b'"\\ud800"', CSV) == b"\\ud800"


def test_the_management_port_is_in_the_containers_range() -> None:
    def management(**env: str) -> str:
        return read_environment(env).variables["TSX_MANAGEMENT_ADDRESS"]

    def in_range(ports: str) -> str:
        return management(SAGEMAKER_BIND_TO_PORT="7000", SAGEMAKER_SAFE_PORT_RANGE=ports)

    assert management() == "http://127.0.0.1:8081"
    assert in_range("7000-7009") == "http://127.0.0.1:7009"
    assert in_range("7000-7000") == "http://127.0.0.1:0"
    # 8081 may be used by another container.
    assert management(SAGEMAKER_BIND_TO_PORT="7000") == "http://127.0.0.1:0"
    with pytest.raises(SettingError, match="SAGEMAKER_SAFE_PORT_RANGE is 'a'"):
        management(SAGEMAKER_SAFE_PORT_RANGE="a-b")


@pytest.mark.parametrize(
    ("env", "mode", "seconds", "registration"),
    [
        ({}, "realtime", "60", {}),
        ({"SAGEMAKER_BATCH": "true"}, "transform", "600", {}),
        ({"TSX_SAGEMAKER_MODE": "Asynchronous"}, "asynchronous", "3600", {}),
        ({"TSX_SAGEMAKER_MODE": "serverless"}, "serverless", "60", {"initial_workers": 1}),
    ],
)
def test_each_endpoint_type_has_its_own_timeouts_and_workers(
    env: dict[str, str], mode: str, seconds: str, registration: dict[str, Any]
) -> None:
    environment = read_environment(env)
    assert (environment.mode, environment.order) == (mode, registration)
    assert environment.variables["TSX_DEFAULT_RESPONSE_TIMEOUT"] == seconds
    if mode == "serverless":
        assert environment.variables["TSX_DEFAULT_STARTUP_TIMEOUT"] == "180"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TSX_SAGEMAKER_MODE", "serverles", "did you mean 'serverless'"),
        ("TSX_SAGEMAKER_LINES", "maybe", "LINES is 'maybe'; it takes true or false"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "loud", "LEVEL is 'LOUD'"),
        ("TSX_SAGEMAKER_LINE", "true", "'TSX_SAGEMAKER_LINE'; did you mean 'TSX_SAGEMAKER_LINES'"),
        ("TSX_SAGEMAKER_BUCKET_PREFIX", "true", r"'TSX_SAGEMAKER_BUCKET_PREFIX'\. There are "),
    ],
)
def test_an_invalid_variable_is_refused(name: str, value: str, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        read_settings({name: value})


@pytest.mark.parametrize(("text", "level"), [("30", 30), ("warning", 30), ("", None)])
def test_a_log_level_is_a_name_or_a_number(text: str, level: int | None) -> None:
    assert read_environment({"SAGEMAKER_CONTAINER_LOG_LEVEL": text}).log_level == level


def test_variables_and_image_files_override_platform_defaults(tmp_path: Path) -> None:
    (tmp_path / "tsx.toml").write_text("default_response_timeout = 30\ndrain_timeout = 7\n")
    _, settings = read_settings(
        {
            "TSX_CONFIG": str(tmp_path / "tsx.toml"),
            "TSX_DRAIN_TIMEOUT": "9",
            "SAGEMAKER_BIND_TO_PORT": "7000",
        }
    )
    names = ("default_response_timeout", "drain_timeout", "default_startup_timeout")
    assert [getattr(settings, name) for name in names] == [30, 9, 600]
    assert settings.inference_address == "http://0.0.0.0:7000"


def version(workers: int = 1, batch: int = 1, queue: int = 100) -> Any:
    plan = SimpleNamespace(batch_size=batch, job_queue_size=queue)
    return SimpleNamespace(
        min_workers=workers, batch_size=batch, workers=[None] * workers, plan=plan
    )


MAX_PAYLOAD = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "50", "SAGEMAKER_BATCH_STRATEGY": "SINGLE_RECORD"}


@pytest.mark.parametrize(
    ("version", "env", "expected"),
    [
        (version(2, 8), {}, (4, "MULTI_RECORD", 6)),
        (version(2, 8), {"TSX_SAGEMAKER_LINES": "false"}, (16, "SINGLE_RECORD", 6)),
        (version(8, 8), MAX_PAYLOAD, (2, "SINGLE_RECORD", 50)),
        (version(), {"SAGEMAKER_MAX_CONCURRENT_TRANSFORMS": "9"}, (9, "MULTI_RECORD", 6)),
    ],
)
def test_transform_parameters_keep_the_workers_busy_by_default(
    version: Any, env: dict[str, str], expected: tuple[int, str, int]
) -> None:
    job = parameters((version,), read_environment(env))
    names = ("MaxConcurrentTransforms", "BatchStrategy", "MaxPayloadInMB")
    assert tuple(job[name] for name in names) == expected


@pytest.mark.parametrize(
    ("states", "given_up"),
    [
        # One worker serves.
        ([WorkerState.READY, WorkerState.FAILED], False),
        # Requests wait for another process, which will start.
        ([WorkerState.BACKING_OFF], False),
        ([WorkerState.FAILED, WorkerState.FAILED], True),
        ([], False),
    ],
)
def test_an_instance_is_given_up_only_if_no_worker_can_serve(
    states: list[WorkerState], given_up: bool
) -> None:
    workers = [SimpleNamespace(state=state) for state in states]
    version: Any = SimpleNamespace(min_workers=1, workers=workers)
    assert is_given_up(version) is given_up


@given(st.integers(0, 8), st.integers(1, 512), st.integers(1, 1000))
def test_queued_lines_fill_batches_within_the_queue_size(
    workers: int, batch: int, queue: int
) -> None:
    lines = max_queued_lines(version(workers, batch, queue))
    assert 1 <= lines <= queue
    assert lines >= min(queue, 2 * batch * workers)


@pytest.mark.parametrize(
    ("source", "supports_batches"),
    [
        ("def model_fn(d): ...", False),
        ("def predict_fn(i, m): ...", False),
        ("# without batch_predict_fn", False),
        ("from other import batch_predict_fn", True),
        ("batch_predict_fn = make()", True),
        ("def predict_fn(i, m): ...\ndef batch_predict_fn(i, m): ...", True),
        ("def (", False),
    ],
)
def test_batches_are_large_if_the_code_supports_them(source: str, supports_batches: bool) -> None:
    assert has_batch_function(source) is supports_batches


def test_the_toolkits_layout_is_served_as_a_model(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "serve.py").write_text("def model_fn(d): ...")
    (code / "requirements.txt").write_text("six")
    assert toolkit_model(tmp_path, {}) is None
    program = {"SAGEMAKER_PROGRAM": "serve.py"}
    model = find_model(tmp_path, {**program, "SAGEMAKER_SUBMIT_DIRECTORY": "s3://bucket/code"})
    assert model.archive is not None
    assert model.archive.manifest.data == {
        "model": {
            "modelName": "model",
            "handler": HANDLER,
            "requirementsFile": "code/requirements.txt",
        },
        "sagemaker": {"code": "code", "program": "serve.py"},
    }
    assert model.order.batch_size is None
    config = tmp_path / "model-config.yaml"
    config.write_text("independentRows: true\n")
    assert find_model(tmp_path, program).order.batch_size == 32
    config.write_text("independentRows: true\nbatchSize: 3\n")
    model = find_model(tmp_path, program, "mine")
    assert model.archive is not None
    assert (model.order.batch_size, model.order.model_name) == (None, "mine")
    assert model.archive.config.batch_size == 3
    with pytest.raises(SettingError, match=r"SAGEMAKER_PROGRAM is 'other.py', but .* is not there"):
        find_model(tmp_path, {"SAGEMAKER_PROGRAM": "other.py"})
    config.write_text("batchSize: [\n")
    with pytest.raises(ArchiveError):
        find_model(tmp_path, program)


def test_a_single_weights_file_is_a_model_but_two_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.pth").touch()
    archive = find_model(tmp_path, {}).archive
    assert archive is not None
    assert archive.manifest.data["sagemaker"] == {"code": "code", "program": ""}
    (tmp_path / "b.pt").touch()
    with pytest.raises(SettingError, match=r"no archive, but a\.pth, b\.pt"):
        find_model(tmp_path, {})


def test_an_invalid_model_name_is_replaced_by_a_unique_one() -> None:
    assert registry_name("abc-1") == "abc-1"
    assert registry_name("a/b") != registry_name("a b")
    assert len(registry_name("x" * 300)) < 100


def test_a_model_has_the_size_of_its_files_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 1000)
    assert size_of(tmp_path) == 1000
    with pytest.raises(BadRequest, match=r"which is not a directory\."):
        size_of(tmp_path / "c")


def test_pages_of_models_are_complete() -> None:
    unused: Any = None
    models = Models(unused, 1, unused)
    models._loaded = {str(number): cast("Any", number) for number in range(250)}
    page, token = models.page(None)
    listed_names = [*page]
    while token is not None:
        page, token = models.page(token)
        listed_names += page
    assert listed_names == list(range(250))
    with pytest.raises(BadRequest, match="next_page_token is 'x'"):
        models.page("x")
    with pytest.raises(BadRequest, match="to load a model"):
        asyncio.run(models.load("", ""))
