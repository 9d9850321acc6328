"""SageMaker's data capture: the documented lines, and recordings that are exported and read."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Run
from tsx_cli.monitor.data_capture import encode_capture, read_capture
from tsx_runtime.recordings import NotARecording, Recorded, encode, file_head

# From AWS's documentation of the capture of real-time endpoints.
DOCUMENTED = (
    '{"captureData":{"endpointInput":{"observedContentType":"text/csv","mode":"INPUT","data":'
    '"69,0,153.7\\n","encoding":"CSV"},"endpointOutput":{"observedContentType":'
    '"text/csv; charset=utf-8","mode":"OUTPUT","data":"0.0254181120544672","encoding":"CSV"}},'
    '"eventMetadata":{"eventId":"aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee","inferenceTime":'
    '"2022-02-14T17:25:49Z"},"eventVersion":"0"}\n'
)
KINDS = st.sampled_from(["text/csv", "application/json; charset=utf-8", "image/png"])


def test_a_line_of_sagemaker_is_a_request_with_its_answer() -> None:
    chosen_id = DOCUMENTED.replace(
        '"eventId"', '"customAttributes":["a=1","tsx-version=2.0"],"inferenceId":"i","eventId"'
    )
    file = BytesIO(f"{DOCUMENTED}\n{chosen_id}".encode())
    first, second = read_capture(file, "a.jsonl", "churn", "AllTraffic")
    assert first == Recorded(
        1644859549.0,
        "AllTraffic",
        "",
        (("content-type", "text/csv"),),
        b"69,0,153.7\n",
        200,
        0.0,
        (("content-type", "text/csv; charset=utf-8"),),
        b"0.0254181120544672",
        "churn",
        request_id="aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
    )
    assert (second.request_id, second.version) == ("i", "2.0")


@given(
    st.integers(0, 4 * 10**9).map(float),
    st.sampled_from(["", "1.0"]),
    KINDS,
    st.binary(max_size=30),
    st.none() | st.tuples(KINDS, st.binary(max_size=30)),
)
def test_an_exported_request_is_read_unchanged(
    at: float,
    version: str,
    kind: str,
    body: bytes,
    answer: tuple[str, bytes] | None,
) -> None:
    headers = (("content-type", kind),)
    entry = Recorded(at, version, "", headers, body, request_id="id")
    if answer is not None:
        answer_headers = (("content-type", answer[0]),)
        entry = entry._replace(status=200, answer_headers=answer_headers, answer=answer[1])
    assert list(read_capture(BytesIO(encode_capture(entry)), "a.jsonl")) == [entry]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "{}",
        DOCUMENTED.replace('"encoding":"CSV"', '"encoding":"BASE64"'),
        DOCUMENTED.replace('"encoding":"CSV"', '"encoding":"TIFF"'),
        DOCUMENTED.replace("2022-02-14T17:25:49Z", "yesterday"),
    ],
)
def test_a_damaged_line_is_named(line: str) -> None:
    file = BytesIO((DOCUMENTED + line).encode())
    with pytest.raises(NotARecording, match=r"a\.jsonl, line 2, is not in the format"):
        list(read_capture(file, "a.jsonl"))


def test_a_recording_is_exported_without_failed_requests(run: Run, tmp_path: Path) -> None:
    json_type = (("Content-Type", "application/json"),)
    entry = Recorded(
        1.5, "1.0", "", json_type, b"[1]", 200, 0.1, json_type, b"[0.9]", request_id="a"
    )
    failed = entry._replace(status=500, answer=b"error")
    (tmp_path / "m.tsxrec").write_bytes(file_head("m") + encode(entry) + encode(failed))
    capture, unwritten = tmp_path / "capture.jsonl", tmp_path / "other.jsonl"
    written = run("monitor export", tmp_path / "m.tsxrec", "-o", capture)
    assert (written.code, written.out) == (0, f"{capture}: 1 requests, without 1 that failed\n")
    assert json.loads(capture.read_text()) == {
        "captureData": {
            "endpointInput": {
                "observedContentType": "application/json",
                "mode": "INPUT",
                "data": "[1]",
                "encoding": "JSON",
            },
            "endpointOutput": {
                "observedContentType": "application/json",
                "mode": "OUTPUT",
                "data": "[0.9]",
                "encoding": "JSON",
            },
        },
        "eventMetadata": {
            "eventId": "a",
            "customAttributes": ["tsx-version=1.0"],
            "inferenceTime": "1970-01-01T00:00:01.500Z",
        },
        "eventVersion": "0",
    }
    missing = run("monitor export missing.tsxrec -o", unwritten)
    assert (missing.code, "missing.tsxrec" in missing.err) == (1, True)
    assert not unwritten.exists()
