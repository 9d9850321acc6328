"""The results of the comparison with other servers: medians, verdicts, tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks import machine, openloop, servers
from benchmarks.peers import environments, field, report, verdict
from benchmarks.peers.measure import CONNECTIONS, WORKLOADS, Key, OpenKey, Point, Results, Workload

ROOT = Path(__file__).parents[2]
OK_MODEL = ROOT / "benchmarks" / "models" / "ok.py"


def point(rate: float, p50: float = 1, p99: float = 2) -> Point:
    return Point(rate, p50, p99, 10)


def everywhere(tsx_point: Point, peer_point: Point) -> dict[Key, Point]:
    return {
        Key(workload.name, peer, connections): tsx_point if peer.startswith("tsx") else peer_point
        for workload in WORKLOADS
        for peer in field.PEERS
        for connections in CONNECTIONS
    }


def states(
    medians: dict[Key, Point],
    failed: dict[Key, str] | None = None,
    bare: dict[str, float] | None = None,
) -> dict[str, str]:
    return {
        judgement.promise: judgement.state
        for judgement in verdict.judge_all(medians, failed or {}, bare or {})
    }


def test_every_promise_holds_if_tsx_is_far_ahead() -> None:
    bare = {"image": 2000.0, "transformer": 2000.0}
    assert set(states(everywhere(point(2000, 0.1, 0.2), point(100)), bare=bare).values()) == {
        "holds"
    }


def test_equal_figures_do_not_fulfil_promises_to_be_faster() -> None:
    bare = {"image": 100.0, "transformer": 100.0}
    states_by_promise = states(everywhere(point(100), point(100)), bare=bare)
    assert {promise for promise, state in states_by_promise.items() if state == "holds"} == {
        promise
        for promise in states_by_promise
        if promise.startswith(("bare loop", "tsx-torchserve beside tsx"))
    }


def test_the_torchserve_command_is_compared_with_tsx_serve_and_torchserve() -> None:
    medians = everywhere(point(1000, p99=4), point(100, p99=7)) | {
        Key("ok", "tsx-torchserve", 16): point(790, p99=3)
    }
    short = {
        judgement.promise: judgement.short
        for judgement in verdict.judge_all(medians, {}, {})
        if judgement.promise.startswith("tsx-torchserve")
    }
    assert short == {
        "tsx-torchserve beside tsx: every workload: at least 0.8 times the requests/s": (
            "ok at 16: 0.79",
        ),
        "tsx-torchserve beside TorchServe: ok: at most 0.5 times the p99": (
            "ok at 1: 1.75",
            "ok at 64: 1.75",
            "ok at 256: 1.75",
        ),
    }


def test_one_slow_point_breaks_a_promise_and_is_named() -> None:
    medians = everywhere(point(2000, 0.1, 0.2), point(100)) | {
        Key("ok", "tsx", 64): point(799, 0.1, 0.2)
    }
    (short,) = [
        judgement
        for judgement in verdict.judge_all(medians, {}, {})
        if "TorchServe: ok at" in judgement.promise
    ]
    assert (short.state, short.ratio, short.where, short.short) == (
        "falls short",
        7.99,
        "ok at 64",
        ("ok at 64: 7.99",),
    )


def test_a_failure_of_tsx_breaks_a_promise() -> None:
    medians, key = everywhere(point(2000, 0.1, 0.2), point(100)), Key("image", "tsx", 256)
    del medians[key]
    assert (
        states(medians, {key: "Socket errors"})["TorchServe: every workload: more requests/s"]
        == "falls short"
    )
    assert states(medians)["TorchServe: every workload: more requests/s"] == "holds", (
        "a point that was not asked for"
    )


def test_promises_about_an_omitted_peer_are_not_measured() -> None:
    medians = {
        key: value
        for key, value in everywhere(point(2000, 0.1, 0.2), point(100)).items()
        if key.peer != "Mosec"
    }
    states_by_promise = states(medians)
    assert {
        state for promise, state in states_by_promise.items() if promise.startswith("Mosec")
    } == {"not measured"}
    assert states_by_promise["LitServe: ok: at least 20 times the requests/s"] == "holds"


def test_medians_are_computed_by_column_without_failures() -> None:
    complete_key, failed_key = Key("ok", "tsx", 1), Key("ok", "tsx", 16)
    results = Results(
        closed={
            complete_key: [Point(1, 30, 5, 9), Point(2, 10, 7, 8), Point(3, 20, 6, 7)],
            failed_key: [point(1)],
        },
        failed={failed_key: "no"},
    )
    assert results.medians() == {complete_key: Point(2, 20, 6, 8)}
    assert results.capacity("ok", "tsx") == 2
    assert results.capacity("mlp", "tsx") is None


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("OK", "OK", True),
        ("OK", "KO", False),
        ([0.1, 0.2], [0.1, 0.200001], True),
        ([0.1, 0.2], [0.1, 0.21], False),
        ([0.1], [0.1, 0.2], False),
        ({"code": 500}, "OK", False),
    ],
)
def test_answers_are_compared_as_values(first: object, second: object, equal: bool) -> None:
    assert field.is_alike(first, second) == equal
    assert field.read(json.dumps(first, indent=2).encode()) == first


def test_the_report_lists_omissions_failures_and_invalid_loads() -> None:
    load_result = openloop.Result(
        *(
            100,
            1,
            "constant",
            256,
            100,
            90,
            5,
            {"500": 3},
            1,
            1,
            90,
            1,
            2,
            3,
            4,
            5,
            0.1,
            0,
            0.1,
            0.95,
            0,
            "the generator used 95% of a core",
        )
    )
    results = Results(
        closed={Key("ok", "tsx", 16): [point(2000)], Key("ok", "Mosec", 16): [point(100)]},
        opened={OpenKey("ok", "tsx", 50, "constant"): [load_result]},
        failed={Key("ok", "LitServe", 256): "Socket errors: timeout 3"},
        left_out={"TorchServe (ok)": "there is no java on the PATH"},
    )
    noise = machine.Noise()
    noise.samples, noise.loads = [0.04, 0.04, 0.06], [0.5, 0.5, 0.5]
    text = report.report_text(results, "head", noise, noise.disturbed())
    for part in (
        "| ok | 16 | Mosec | 100 |",
        "| 20.00 |",
        "Socket errors: timeout 3",
        "no java on the PATH",
        "says nothing of the server",
        "NOT QUIET",
    ):
        assert part in text
    assert (
        json.loads(json.dumps(report.as_json(results, "head", noise, [])))["failed"][0]["peer"]
        == "LitServe"
    )


def test_an_even_machine_is_quiet() -> None:
    noise = machine.Noise()
    noise.samples = [0.04, 0.041, 0.042] * 10 + [0.2]
    assert noise.disturbed() == [], "one run in thirty that was interrupted says little of medians"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_has_a_model_whose_two_entrances_agree(workload: Workload) -> None:
    file = ROOT / "benchmarks" / "models" / f"{workload.model}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    model.start()
    body = model.sample()
    direct, handled = (
        model.answers([body, body]),
        model.handle([{"body": bytearray(body)}] * 2, None),
    )
    assert len(direct) == 2
    assert field.is_alike(direct, handled)


def test_an_environment_that_is_named_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TSX_PEER_TORCHSERVE", str(tmp_path))
    assert environments.environment_of("TorchServe", tmp_path / "never") == tmp_path
    assert not (tmp_path / "never").exists()


def test_a_program_that_is_not_there_is_named_with_its_package() -> None:
    with pytest.raises(environments.Missing, match="apt install no-such-package"):
        environments.program("no-such-program", "no-such-package")


@pytest.fixture(scope="module")
def ok_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servers.archive(tmp_path_factory.mktemp("ok"), "ok", "--handler", OK_MODEL)


@pytest.mark.skipif(sys.platform != "linux", reason="the comparison is for Linux")
def test_the_front_end_is_the_process_that_holds_the_clients_connections(
    ok_archive: Path, tmp_path: Path
) -> None:
    with field.contender("tsx", tmp_path, tmp_path, OK_MODEL, ok_archive, b"{}", "OK") as contender:
        assert [process.pid for process in contender.front_end] == [contender.server.process.pid]
        assert contender.cpu_seconds() > 0
        assert contender.url.endswith("/predictions/ok")


@pytest.mark.skipif(sys.platform != "linux", reason="the comparison is for Linux")
def test_a_server_with_other_answers_does_not_take_part(ok_archive: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"answered 'OK'.* 'KO'"),
        field.contender("tsx", tmp_path, tmp_path, OK_MODEL, ok_archive, b"{}", "KO"),
    ):
        pytest.fail("it took part")
