"""`tsx replay` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Answering, Run
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_cli.replay.command import _show
from tsx_cli.replay.run import plan, target_of
from tsx_runtime.recordings import Recorded, encode, file_head, read

RECORDED = Recorded(1.0, "1.0", "", (), b"x", 200, 0.1)

ECHO = """
def handle(data, context):
    answers = []
    for idx, row in enumerate(data or []):
        word = bytes(row["body"]).decode()
        if word == "number":
            answers.append({"a": 5.00095e-07 if context.manifest["model"]["modelVersion"] == "1.0" else 5.00096e-07})
            continue
        if word == "raise":
            raise ValueError("no")
        own = context.get_request_header(idx, "X-Own") or ""
        more = bytes(row["a"]).decode() if "a" in row else ""
        answers.append(f"{context.manifest['model']['modelVersion']} {word} {own}{more}")
    return answers
"""


@pytest.fixture(scope="module")
def served(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("replay")
    for version in ("1.0", "2.0"):
        path = store / f"echo-{version}.mar"
        make_model(path, ECHO, name="echo", version=version, config="batchSize: 8\n")
    with running_server(make_settings(store)) as running:
        for version in ("1.0", "2.0"):
            running.register(f"echo-{version}.mar", initial_workers=1)
        yield running


def record(model: str, *entries: Recorded) -> str:
    """Write a recording, and return its name."""
    Path(f"{model}.tsxrec").write_bytes(file_head(model) + b"".join(map(encode, entries)))
    return f"{model}.tsxrec"


@given(st.lists(st.integers(0, 10**6), min_size=1), st.sampled_from([0.5, 1.0, 4.0]))
def test_due_times_are_recorded_times_divided_by_the_speed(times: list[int], speed: float) -> None:
    entries = [Recorded(float(time), "1.0", "", (), b"") for time in sorted(times)]
    assert [(time, entry.at) for time, entry in plan(entries, speed)] == [
        ((entry.at - entries[0].at) / speed, entry.at) for entry in entries
    ]


def test_requests_go_to_the_recorded_model_or_a_given_one() -> None:
    entry = Recorded(1.0, "1.0", "", (), b"", model="echo")
    assert target_of(entry, None, None) == "/predictions/echo"
    assert target_of(entry, "other", "canary") == "/predictions/other/canary"
    chat = entry._replace(headers=(("url_path", "v1/chat/completions"),))
    # The server's traffic rules choose the version.
    assert target_of(chat, None, None) == "/predictions/echo//v1/chat/completions"
    assert target_of(chat, None, "2.0") == "/predictions/echo/2.0/v1/chat/completions"
    assert target_of(entry._replace(query="a=1"), None, "2.0") == "/echo/2.0/predict?a=1"


def test_recorded_requests_are_replayed_and_compared(served: RunningServer, run: Run) -> None:
    inference = str(served.inference.base_url)
    recording = f"models record echo --url {served.management.base_url}"
    for incomplete in ("--answers", "--max-size 1MB"):
        assert run(f"{recording} {incomplete}").code == 2
    recording_result = run(f"{recording} --share 100% --max-size 1MB --max-age 2h --answers")
    assert recording_result.out.startswith(
        "echo: 100 % of the requests are recorded, with answers, up to 1.0 MB, for 2 hours\nrecorded: 0\n"
    )
    header = {"x-own": "own"}
    for number in range(20):
        headers = header | {"authorization": "Bearer none"}
        served.inference.post("/predictions/echo", content=b"%d" % number, headers=headers)
    served.inference.post("/echo/predict?a=more", content=b"x", headers=header)
    assert served.inference.post("/predictions/echo", content=b"raise").status_code == 500
    directory = json.loads(run(f"{recording} --json").out)["directory"]
    stopped = run(f"{recording} --off")
    assert stopped.out.startswith("echo: not recorded\n")
    assert directory in stopped.out
    assert len(list(read(Path(directory)))) == 22

    replay = f"replay {directory} --url {inference} --speed 1000"
    equal = run(f"{replay} --json")
    assert equal.code == 0, equal.err
    summary = json.loads(equal.out)
    assert (summary["sent"], summary["answers"]) == (22, {"200": 21, "500": 1})
    assert (summary["failed"], summary["different"]) == ({}, [])
    assert (summary["compared"], summary["equal"]) == (22, 22)
    assert summary["p99_ms"] >= summary["p50_ms"] > 0

    different = run(f"{replay} --version 2.0 --limit 3")
    assert different.code == 0, different.err
    lines = different.out.splitlines()
    assert lines[1].split()[:2] == ["sent", "3"]
    assert "equal answers" in different.out
    assert "0 of 3" in different.out
    assert "recorded 200 1.0 0 own, now 200 2.0 0 own" in different.out
    removed = run(f"{recording} --off --remove --json")
    assert json.loads(removed.out)["files"] == 0


def test_numbers_are_compared_within_a_tolerance_by_default(
    served: RunningServer, run: Run
) -> None:
    def replay(file: str, arguments: str = "", code: int = 0) -> str:
        options = f"--version 2.0 --url {served.inference.base_url}"
        result = run(f"replay {file} {options} {arguments}")
        assert code in (0, result.code)
        return result.out

    entry = RECORDED._replace(body=b"number", answer=b'{"a": 5.00095e-07}')
    recording = record("echo", entry)
    result = json.loads(replay(recording, "--json"))
    assert (result["equal"], result["different"]) == (1, [])
    assert result["compare"] == "numeric, rtol 0.0001, atol 1e-06"
    assert result["largest_difference"] == pytest.approx(1e-12)
    exact = replay(recording, "--compare exact")
    assert "0 of 1, compared by exact" in exact
    assert "largest difference" in exact
    assert exact.endswith("\n  a: 5.00095e-07 (recorded), 5.00096e-07 (now)\n")
    ignored = replay(recording, "--compare exact --ignore a")
    assert "1 of 1, compared by exact, without a" in ignored
    for invalid in ("plugin:mine", "numeric:rtol=-1", "top-k:k=0", "sometimes"):
        replay(recording, f"--compare {invalid}", code=2)
    record("echo", entry._replace(answer=b'{"a": 0.002}', precision="bf16"))
    assert next(read(Path(recording))).precision == "bf16"
    assert "numeric, rtol 0.01, atol 0.001" in replay(recording)


def test_nothing_is_compared_without_recorded_responses(served: RunningServer, run: Run) -> None:
    recording = record("gone", *(Recorded(float(time), "1.0", "", (), b"x") for time in range(300)))
    replay = f"replay {recording} --url {served.inference.base_url}"
    result = run(f"{replay} --model echo --speed 100000 --concurrency 2 --json")
    summary = json.loads(result.out)
    assert (summary["sent"], summary["answers"], summary["compared"]) == (300, {"200": 300}, 0)
    missing = run(f"{replay} --limit 1")
    assert "answered 404" in missing.out
    assert (missing.code, "--model and --version choose" in missing.err) == (1, True)


@pytest.mark.usefixtures("processes")
def test_a_replay_with_only_refused_requests_fails(run: Run, tmp_path: Path) -> None:
    recording = record("echo", RECORDED)
    with running_server(make_settings(tmp_path, inference_token="secret")) as locked:
        result = run(f"replay {recording} --url {locked.inference.base_url}")
    assert (result.code, "answered 400" in result.out) == (1, True)
    assert "400: Token Authorization failed" in result.err
    assert "TSX_INFERENCE_TOKEN=TOKEN" in result.err


def test_a_replay_with_redirected_requests_fails(run: Run, answering: Answering) -> None:
    url = answering(301, b"", location="https://other/")
    result = run(f"replay {record('echo', RECORDED)} --url {url}")
    assert (result.code, "answered 301" in result.out) == (1, True)
    assert "no request got the same answer" in result.err


def test_a_replay_without_a_server_is_reported(
    run: Run, free_ports: Callable[[int], list[int]]
) -> None:
    free_url = f"http://127.0.0.1:{free_ports(1)[0]}"
    result = run(f"replay {record('echo')} --url {free_url}")
    assert (result.code, f"no server answers at {free_url}" in result.err) == (1, True)
    assert run("replay echo.tsxrec --speed nan").code == 2


def test_an_invalid_recording_is_reported(served: RunningServer, run: Run) -> None:
    Path("b.tsxrec").write_bytes(b"PK")
    Path("empty").mkdir()
    for path, error in (
        (record("echo"), "contains no complete request"),
        ("b.tsxrec", "is not a recording: its first line is invalid"),
        ("empty", "contains no recording (*"),
        ("absent", "absent cannot be read: No such file"),
    ):
        result = run(f"replay {path} --url {served.inference.base_url}")
        assert (result.code, error in result.err) == (1, True)


def test_control_characters_of_responses_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"answers": {}, "failed": {}, "sent": 1, "seconds": 1.0, "compared": 1, "equal": 0}
    summary |= {"compare": "exact", "largest_difference": None}
    numbers = dict.fromkeys(("p50_ms", "p99_ms", "max_ms", "late_p99_ms", "late_max_ms"))
    sides = {
        "recorded": {"status": 200, "answer": "\x1b[2J"},
        "now": {"status": 200, "answer": "a\nb\x9b"},
    }
    _show({**summary, **numbers, "different": [{"at": 0.5, **sides, "why": "a: \x1b"}]})
    output_lines = capsys.readouterr().out.splitlines()
    assert output_lines[-1] == r"  a: \x1b"
    assert output_lines[-2] == r"differs at 0.5 s: recorded 200 \x1b[2J, now 200 a\nb\x9b"
