"""The context of a handler: its requests, responses and headers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.wire import parse_header_block, request_meta
from tsx_runtime.worker.handler_api.context import Context, Headers, RequestProcessor


@pytest.fixture
def context() -> Context:
    context = Context("m", "/models/m", {"model": {"modelName": "m"}}, 4, None, "0.1")
    metas = [
        request_meta(
            "one",
            b"q=1",
            [(b"Content-Type", b"text/plain"), (b"X-User", b"ann"), (b"x-user", b"bob")],
        ),
        request_meta("two", b"", [(b"ts_request_sequence_id", b"seq-7")]),
    ]
    context.begin(
        [meta.decode("latin-1") for meta in metas], {1: {"data": {"content-type": "image/png"}}}
    )
    return context


def test_it_has_the_properties_of_model_and_machine(context: Context) -> None:
    assert context.model_name == "m"
    assert context.manifest["model"]["modelName"] == "m"
    assert context.model_yaml_config == {}
    assert context.system_properties == {
        "model_dir": "/models/m",
        "gpu_id": None,
        "batch_size": 4,
        "server_name": "MMS",
        "server_version": "0.1",
        "limit_max_image_pixels": True,
    }


def test_the_ids_and_headers_of_a_request_are_found_by_its_position(context: Context) -> None:
    assert context.request_ids == {0: "one", 1: "two"}
    assert [context.get_request_id(idx) for idx in (0, 1, 2)] == ["one", "two", None]
    assert context.get_request_id() == "one"
    headers = ("content-type", "CONTENT-TYPE", "missing", "X-User")
    assert [context.get_request_header(0, name) for name in headers] == [
        "text/plain",
        "text/plain",
        None,
        "bob",
    ]
    assert list(context.get_all_request_header(0)) == ["Content-Type", "X-User"]
    assert context.get_request_header(1, "data") == {"content-type": "image/png"}
    assert context.get_sequence_id(1) == "seq-7"


def test_status_headers_and_content_type_belong_to_one_request(context: Context) -> None:
    context.set_response_status(418, "teapot", idx=1)
    context.set_response_header(1, "X-One", 1)
    context.set_response_content_type(1, "text/css")
    assert context.get_response_status(1) == (418, "teapot")
    assert context.get_response_headers(1) == {"X-One": "1", "content-type": "text/css"}
    assert context.get_response_content_type(1) == "text/css"
    assert context.get_response_status(0) == (200, None)
    assert context.get_response_headers(0) == {}


def test_all_statuses_can_be_set_at_once(context: Context) -> None:
    context.set_all_response_status(507, "full")
    assert [context.get_response_status(idx) for idx in (0, 1)] == [(507, "full")] * 2


def test_the_next_batch_begins_without_statuses_and_headers(context: Context) -> None:
    context.set_response_status(500, idx=0)
    context.cache = {"kept": True}  # type: ignore[attr-defined]  # handlers hang what they like on it
    context.begin(["three\r\n\r\n"])
    assert context.get_response_status(0) == (200, None)
    assert context.request_ids == {0: "three"}
    assert context.cache == {"kept": True}  # type: ignore[attr-defined]


def test_an_unknown_request_position_is_an_index_error(context: Context) -> None:
    with pytest.raises(IndexError, match="no request 2 in a batch of 2"):
        context.set_response_status(200, idx=2)


def test_headers_are_parsed_only_on_access(context: Context) -> None:
    context.get_request_id(0)
    assert context.processors == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("X-A", "a\r\nSet-Cookie: x=1", "line break"),
        ("X-A", "a\0b", "line break"),
        ("X-A", "漢", "latin-1"),
        ("X-A\r\nB", "x", "name of a header"),
        ("", "x", "name of a header"),
        ("Ä", "x", "name of a header"),
    ],
)
def test_an_invalid_response_header_is_refused(
    context: Context, name: str, value: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        context.set_response_header(0, name, value)


@given(st.text(max_size=12), st.text(max_size=30))
def test_a_header_becomes_exactly_one_line_or_is_refused(name: str, value: str) -> None:
    processor = RequestProcessor({})
    try:
        processor.add_response_property(name, value)
    except ValueError:
        assert processor.header_block() == b""
        return
    lines = list(parse_header_block(processor.header_block().decode("latin-1")))
    assert lines in ([], [(name, value)])


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "Connection"])
def test_a_handler_cannot_set_headers_that_frame_the_answer(name: str) -> None:
    processor = RequestProcessor({})
    processor.add_response_property(name, "1")
    assert processor.header_block() == b""


@pytest.mark.parametrize("code", [0, 100, 199, 600, "200", None])
def test_an_invalid_response_status_is_refused(context: Context, code: Any) -> None:
    with pytest.raises(ValueError, match="status"):
        context.set_response_status(code)


def test_request_processors_can_be_listed_and_replaced(context: Context) -> None:
    first, second = context.request_processor
    assert first.get_request_properties()["x-user"] == "bob"
    first.report_status(404, "gone")
    assert (first.get_response_status_code(), first.get_response_status_phrase()) == (404, "gone")
    context.request_processor = [RequestProcessor({"describe": "True"}), second]
    assert context.get_request_header(0, "Describe") == "True"


def test_contexts_are_equal_if_all_their_properties_are() -> None:
    assert Context("m", "/d", {}, 1, None, "1") == Context("m", "/d", {}, 1, None, "1")
    assert Context("m", "/d", {}, 1, None, "1") != Context("n", "/d", {}, 1, None, "1")


def test_sending_a_piece_outside_a_batch_is_an_error(context: Context) -> None:
    with pytest.raises(RuntimeError, match="only while"):
        context.send_piece(0, b"x")


def test_parts_that_come_after_the_answer_are_dropped_and_logged_once(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    sent_pieces: list[object] = []
    context.begin(
        [request_meta("late", b"", []).decode()], None, lambda *piece: sent_pieces.append(piece)
    )
    context.send_piece(0, b"in time")
    context.end()
    for _ in range(3):
        context.send_piece(0, b"late")
    assert sent_pieces == [(0, b"", b"in time")]
    assert len(caplog.messages) == 1
    assert "request late is already answered" in caplog.text


def test_headers_can_be_dumped_and_pickled_like_a_dict() -> None:
    headers = Headers([("Accept", "a"), ("ACCEPT", "b")])
    assert json.dumps(headers) == '{"Accept": "b"}'
    restored = pickle.loads(pickle.dumps(headers))
    assert restored == headers
    assert restored["accept"] == "b"


names = st.sampled_from(["a", "A", "b", "B", "Content-Type", "content-type"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "pop", "default", "update", "popitem", "clear"]),
            names,
            st.integers(),
        ),
        max_size=30,
    )
)
def test_headers_behave_like_a_dict_of_lower_case_names(steps: list[tuple[str, str, int]]) -> None:
    headers = Headers()
    model: dict[str, int] = {}
    for step, name, value in steps:
        if step == "set":
            headers[name] = value
            model[name.lower()] = value
        elif step == "pop":
            assert headers.pop(name, None) == model.pop(name.lower(), None)
        elif step == "default":
            assert headers.setdefault(name, value) == model.setdefault(name.lower(), value)
        elif step == "update":
            headers.update({name: value})
            model.update({name.lower(): value})
        elif step == "popitem" and model:
            key, number = headers.popitem()
            assert (key.lower(), number) == model.popitem()
        elif step == "clear":
            headers.clear()
            model.clear()
        assert {key.lower(): number for key, number in headers.items()} == model
        assert (name in headers) == (name.lower() in model)
        assert headers.get(name) == model.get(name.lower())
    assert headers.copy() == headers
