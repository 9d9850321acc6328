"""`tsx replay` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Answering, Run
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_cli.requests.replay import _show
from tsx_cli.requests.replay_run import plan, target_of
from tsx_runtime.recordings import Recorded, encode, file_head, read

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
        make_model(
            store / f"echo-{version}.mar",
            ECHO,
            name="echo",
            version=version,
            config="batchSize: 8\n",
        )
    with running_server(make_settings(store)) as running:
        for version in ("1.0", "2.0"):
            running.register(f"echo-{version}.mar", initial_workers=1)
        yield running


@given(st.lists(st.integers(0, 10**6), min_size=1), st.sampled_from([0.5, 1.0, 4.0]))
def test_requests_are_due_as_far_apart_as_they_came_or_as_many_times_as_fast(
    times: list[int], speed: float
) -> None:
    entries = [Recorded(float(at), "1.0", "", (), b"") for at in sorted(times)]
    assert [(at, entry.at) for at, entry in plan(entries, speed)] == [
        ((entry.at - entries[0].at) / speed, entry.at) for entry in entries
    ]


def test_requests_go_to_the_model_of_the_recording_or_to_another() -> None:
    entry = Recorded(1.0, "1.0", "", (), b"", model="echo")
    assert target_of(entry, None, None) == "/predictions/echo"
    assert target_of(entry, "other", "canary") == "/predictions/other/canary"
    chat = entry._replace(headers=(("url_path", "v1/chat/completions"),))
    assert (
        target_of(chat, None, None) == "/predictions/echo//v1/chat/completions"
    )  # whichever version the traffic says
    assert target_of(chat, None, "2.0") == "/predictions/echo/2.0/v1/chat/completions"
    assert target_of(entry._replace(query="a=1"), None, "2.0") == "/echo/2.0/predict?a=1"


def test_what_a_server_recorded_is_sent_again_and_compared(
    served: RunningServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    inference = str(served.inference.base_url)
    management = str(served.management.base_url)
    for lacking in (["--answers"], ["--max-size", "1MB"]):
        assert run("models", "record", "echo", *lacking, "--url", management).code == 2
    begun = run(
        "models",
        "record",
        "echo",
        "--share",
        "100%",
        "--max-size",
        "1MB",
        "--max-age",
        "2h",
        "--answers",
        "--url",
        management,
    )
    assert begun.out.startswith(
        "echo: 100 % of the requests are recorded, with answers, up to 1.0 MB, for 2 hours\nrecorded: 0\n"
    )
    for number in range(20):
        served.inference.post(
            "/predictions/echo",
            content=b"%d" % number,
            headers={"x-own": "own", "authorization": "Bearer none"},
        )
    served.inference.post("/echo/predict?a=more", content=b"x", headers={"x-own": "own"})
    assert served.inference.post("/predictions/echo", content=b"raise").status_code == 500
    directory = Path(
        json.loads(run("models", "record", "echo", "--url", management, "--json").out)["directory"]
    )
    stopped = run("models", "record", "echo", "--off", "--url", management)
    assert stopped.out.startswith("echo: not recorded\n")
    assert str(directory) in stopped.out
    assert len(list(read(directory))) == 22

    same = run("replay", directory, "--url", inference, "--speed", 1000, "--json")
    assert same.code == 0, same.err
    reported = json.loads(same.out)
    assert (reported["sent"], reported["answers"], reported["failed"]) == (
        22,
        {"200": 21, "500": 1},
        {},
    )
    assert (reported["compared"], reported["equal"], reported["different"]) == (22, 22, [])
    assert reported["p99_ms"] >= reported["p50_ms"] > 0

    other = run(
        "replay", directory, "--url", inference, "--speed", 1000, "--version", "2.0", "--limit", 3
    )
    assert other.code == 0, other.err
    lines = other.out.splitlines()
    assert lines[1].split()[:2] == ["sent", "3"]
    assert "equal answers" in other.out
    assert "0 of 3" in other.out
    assert "recorded 200 1.0 0 own, now 200 2.0 0 own" in lines
    removed = run("models", "record", "echo", "--off", "--remove", "--url", management, "--json")
    assert json.loads(removed.out)["files"] == 0


def test_numbers_are_compared_within_a_tolerance_by_default(
    served: RunningServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    recorded = [
        Recorded(1.0, "1.0", "", (), b"number", 200, 0.1, (), b'{"a": 5.00095e-07}'),
        Recorded(1.0, "1.0", "", (), b"number", 200, 0.1, (), b'{"a": 0.002}', precision="bf16"),
    ]
    options = ("--version", "2.0", "--url", str(served.inference.base_url))
    (tmp_path / "a.tsxrec").write_bytes(file_head("echo") + encode(recorded[0]))
    done = json.loads(run("replay", "a.tsxrec", "--json", *options).out)
    assert (done["equal"], done["different"], done["compare"]) == (
        1,
        [],
        "numeric, rtol 0.0001, atol 1e-06",
    )
    assert done["largest_difference"] == pytest.approx(1e-12)
    exact = run("replay", "a.tsxrec", "--compare", "exact", *options).out
    assert "0 of 1, compared by exact" in exact
    assert "largest difference" in exact
    assert exact.endswith("\n  a: 5.00095e-07 (recorded), 5.00096e-07 (now)\n")
    assert (
        "1 of 1, compared by exact, without a"
        in run("replay", "a.tsxrec", "--compare", "exact", "--ignore", "a", *options).out
    )
    (tmp_path / "b.tsxrec").write_bytes(file_head("echo") + encode(recorded[1]))
    assert next(read(tmp_path / "b.tsxrec")).precision == "bf16"
    assert (
        "numeric, rtol 0.01, atol 0.001"
        in run("replay", "b.tsxrec", *options).out
    )
    for wrong in ("plugin:mine", "numeric:rtol=-1", "top-k:k=0", "sometimes"):
        assert run("replay", "a.tsxrec", "--compare", wrong, *options).code == 2


def test_without_recorded_answers_nothing_is_compared(
    served: RunningServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    entries = [Recorded(float(at), "1.0", "", (), b"x") for at in range(300)]
    (tmp_path / "a.tsxrec").write_bytes(file_head("gone") + b"".join(map(encode, entries)))
    options = ("--url", str(served.inference.base_url))
    done = run(
        "replay",
        "a.tsxrec",
        "--model",
        "echo",
        "--speed",
        100_000,
        "--concurrency",
        2,
        "--json",
        *options,
    )
    reported = json.loads(done.out)
    assert (reported["sent"], reported["answers"], reported["compared"]) == (300, {"200": 300}, 0)
    missing = run("replay", "a.tsxrec", "--limit", 1, *options)
    assert "answered 404" in missing.out
    assert (missing.code, "--model and --version choose" in missing.err) == (
        1,
        True,
    )


@pytest.mark.usefixtures("processes")
def test_requests_that_are_all_refused_now_are_no_success(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a.tsxrec").write_bytes(
        file_head("echo") + encode(Recorded(1.0, "1.0", "", (), b"x", 200, 0.1))
    )
    with running_server(make_settings(tmp_path, inference_token="secret")) as locked:
        done = run("replay", "a.tsxrec", "--url", str(locked.inference.base_url))
    assert (done.code, "answered 400" in done.out) == (1, True)
    assert (
        "400: Token Authorization failed"
        in done.err
    )
    assert "TSX_INFERENCE_TOKEN=TOKEN" in done.err


def test_redirected_requests_are_no_success(run: Run, answering: Answering, tmp_path: Path) -> None:
    recorded = Recorded(1.0, "1.0", "", (), b"x", 200, 0.1)
    (tmp_path / "a.tsxrec").write_bytes(file_head("echo") + encode(recorded))
    done = run("replay", "a.tsxrec", "--url", answering(301, b"", location="https://other/"))
    assert (done.code, "answered 301" in done.out) == (1, True)
    assert "no request got the same answer" in done.err


def test_what_cannot_be_sent_is_reported(
    run: Callable[..., Any], tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    (tmp_path / "a.tsxrec").write_bytes(file_head("m"))
    (tmp_path / "b.tsxrec").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    for words, reported in (
        (["a.tsxrec", "--url", nobody], f"no server answers at {nobody}"),
        (["b.tsxrec", "--url", nobody], "no server answers"),
    ):
        done = run("replay", *words)
        assert done.code == 1
        assert reported in done.err
    assert run("replay", "a.tsxrec", "--speed", "nan").code == 2


def test_what_is_no_recording_is_reported(
    served: RunningServer, run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a.tsxrec").write_bytes(file_head("m"))
    (tmp_path / "b.tsxrec").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    for place, reported in (
        ("a.tsxrec", "contains no complete request"),
        ("b.tsxrec", "is not a recording: its first line is invalid"),
        ("empty", "contains no recording (*"),
        ("absent", "absent cannot be read: No such file"),
    ):
        done = run("replay", place, "--url", str(served.inference.base_url))
        assert done.code == 1
        assert reported in done.err


def test_answers_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    reported = {"answers": {}, "failed": {}, "sent": 1, "seconds": 1.0, "compared": 1, "equal": 0}
    reported |= {"compare": "exact", "largest_difference": None}
    numbers = dict.fromkeys(("p50_ms", "p99_ms", "max_ms", "late_p99_ms", "late_max_ms"))
    sides = {
        "recorded": {"status": 200, "answer": "\x1b[2J"},
        "now": {"status": 200, "answer": "a\nb\x9b"},
    }
    _show({**reported, **numbers, "different": [{"at": 0.5, **sides, "why": "a: \x1b"}]})
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == r"  a: \x1b"
    assert shown[-2] == r"differs at 0.5 s: recorded 200 \x1b[2J, now 200 a\nb\x9b"
