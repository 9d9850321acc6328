"""`tsx bench --against` with real servers, for every protocol."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.benchmarked import one_round
from tests.support.clients.scripted import OK, scripted
from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving
from tsx_cli.bench.load.generator import run_load
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import Round, command_line, read_results
from tsx_cli.bench.report.shown import rate
from tsx_cli.bench.search.points import knee_of, open_loops
from tsx_cli.common.failure import CliError

pytestmark = pytest.mark.usefixtures("processes")


ECHO = """
def handle(data, context):
    return [{"got": str(sorted(row))[:100]} for row in data or []]
"""
BASE_OPTIONS = "--against http://h --model m --input-kind text"
SHORT_LOAD = ("--duration", 0.1, "--warm-up", 0, "--connections", 2)
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("against")
    make_model(directory / "echo.mar", ECHO, config="batchSize: 4\n")
    environment = {"TSX_CACHE_DIR": str(directory / "cache")}
    with serving(
        ["serve", directory / "echo.mar", *FREE_PORTS, *FREE_GRPC_PORTS], directory, environment
    ) as running:
        yield running


@pytest.mark.parametrize(
    "protocol",
    ["tsx", "torchserve", "kserve-v1", "kserve-v2", "invocations", "grpc", "kserve-v2-grpc"],
)
def test_every_protocol_gets_responses(served: Running, protocol: str) -> None:
    url = served.address("gRPC predictions" if "grpc" in protocol else "predictions")
    payloads = (Payload(b"[1, 2]", "application/json"), Payload(b"\xff", "image/png"))
    plan = LoadPlan(url, "echo", payloads, protocol, connections=2, seconds=0.1, warm_up=0.0)
    load_round = asyncio.run(run_load(plan))
    assert (load_round.errors, load_round.refused, load_round.unanswered) == ({}, 0, 0)
    assert load_round.ok == load_round.sent > 0


def test_a_missing_model_is_also_an_error_over_grpc(served: Running) -> None:
    payloads = (Payload(b"x"),)
    plan = LoadPlan(
        served.address("gRPC predictions"),
        "ehco",
        payloads,
        "grpc",
        mode="open",
        rate=100.0,
        connections=9,
        seconds=0.1,
        warm_up=0.0,
    )
    load_round = asyncio.run(run_load(plan))
    assert load_round.ok == 0
    # TorchServe reports the same gRPC status.
    assert set(load_round.errors) == {"INTERNAL"}


def test_measurements_are_printed_as_a_table_and_written_to_a_file(
    served: Running, run: Run
) -> None:
    (Path("in")).mkdir()
    for name in "ab":
        (Path("in") / name).write_text(name * 10)
    options = ("--against", served.address("predictions"), "--model", "echo", "--input", "in")
    result = run(
        "bench",
        *options,
        *SHORT_LOAD,
        *shlex.split("--rounds 2 --json out.json --slo 'p99<100s,errors<1%'"),
    )
    assert result.code == 0, result.err
    rows = {line.split("  ")[0]: line for line in result.out.splitlines()}
    for row in ("load", "sent", "answers/s", "p50", "p99", "p99.9", "generator", "bounds"):
        assert row in rows, result.out
    assert "±" in rows["answers/s"]
    assert "2 different, 10 bytes" in rows["sent"]
    assert rows["bounds"].endswith("errors<1%: hold")
    results = read_results(Path("out.json"))
    point = results.trials[0].points[0]
    assert len(point.rounds) == 2
    assert results.trials[0].best == 0
    assert results.inputs.source == "in"
    assert (results.against, results.protocol, results.model.name) == (options[1], "tsx", "echo")


def test_an_open_loop_reports_its_rate_and_missed_limits_set_the_exit_code(
    served: Running, run: Run
) -> None:
    options = shlex.split(
        f"--against {served.address('predictions')} --model echo --input-kind text --rate 50 "
        "--arrivals constant"
    )
    result = run("bench", *options, "--duration", 0.2, "--warm-up", 0.1, "--slo", "p50<0.001us")
    assert result.code == 1, result.err
    assert "p50<0.001us: do not hold" in result.out
    assert "50 requests/s, constant" in result.out


def test_a_ramp_finds_the_knee_of_a_running_server(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(plan: LoadPlan, **_: object) -> Round:
        return one_round(plan.rate or 100.0, 10 if (plan.rate or 0.0) < 170 else 400, plan.seed)

    monkeypatch.setattr("tsx_cli.bench.commands.against.measure", measure)
    for name, size in (("small", 10), ("large", 1000)):
        Path(name).write_text("x" * size)
    options = shlex.split(
        "--against http://127.0.0.1:9 --model echo --input small --input large --connections 1"
    )
    result = run("bench", *options, "--duration", 0.2, "--warm-up", 0, "--slo", "p50<50ms,errors<1%", "--ramp", "--price-per-hour", 0.5,
               "--junit", "out.xml", "--json", "out.json")  # fmt: skip
    assert result.code == 0, result.err
    results = read_results(Path("out.json"))
    points = results.trials[0].points
    assert points[0].offered.mode == "closed"
    rates = open_loops(points)
    assert len(rates) > 3
    passing_point, failing_point = knee_of(points)
    assert passing_point is not None
    assert failing_point is not None
    assert results.trials[0].chosen == passing_point
    assert len(passing_point.rounds) >= 3
    assert (
        f"knee: {rate(passing_point)} holds, {rate(failing_point)} does not (p50<50ms,errors<1%)"
        in result.out
    )
    assert "cost/M" in result.out
    assert (
        150 < (passing_point.offered.rate or 0.0) < 170 <= (failing_point.offered.rate or 0.0) < 190
    )
    assert re.search(r"9,150 to 12,044 bytes +[\d,]+ ", result.out)
    cases = {
        case.get("name"): len(case)
        for case in ElementTree.parse("out.xml").getroot().iter("testcase")
    }
    assert cases == {"p50<50ms": 0, "errors<1%": 0, "the throughput follows the rate": 0}


@pytest.mark.parametrize(("first_throughput", "code"), [(100.0, 0), (0.0, 1)])
def test_a_ramp_keeps_its_rounds_if_the_server_stops_after_the_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, first_throughput: float, code: int
) -> None:
    def measure(plan: LoadPlan, **_: object) -> Round:
        if (plan.rate or 0.0) > 50:
            raise CliError("no server answers")
        return one_round(plan.rate or 100.0, 10, plan.seed).model_copy(
            update={} if first_throughput else {"throughput": 0.0}
        )

    monkeypatch.setattr("tsx_cli.bench.commands.against.measure", measure)
    result = run("bench", *BASE_OPTIONS.split(), *SHORT_LOAD, "--ramp", "--slo", "p50<50ms")
    assert result.code == code, result.err
    if code:
        assert "--ramp: no answer came within 0.1 s" in result.err
    else:
        assert re.search(
            r"note: the ramp ended at 5\d\.\d requests/s: no server answers\n", result.out
        )
        assert re.search(
            r"knee: 3\d\.\d/s holds, the load ended before one that does not", result.out
        )


def test_a_single_rate_has_no_knee_even_if_the_generator_is_the_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited_round = one_round(10, 10, 0, limited="it was late")
    monkeypatch.setattr(
        "tsx_cli.bench.commands.against.measure",
        lambda plan, **_: limited_round.model_copy(update={"sent": 1000}),
    )
    result = run("bench", *BASE_OPTIONS.split(), "--duration", 0.1, "--warm-up", 0, "--rate", 100)
    assert "the load generator and not the server: it was late" in result.out
    assert "knee" not in result.out


def test_a_missed_limit_is_a_failure_in_the_junit_file(served: Running, run: Run) -> None:
    options = (
        *shlex.split(f"--against {served.address('predictions')} --model echo --input-kind text"),
        *SHORT_LOAD,
    )
    assert run("bench", *options, "--slo", "p50<0.001us", "--junit", "out.xml").code == 1
    (failure,) = ElementTree.parse("out.xml").getroot().iter("failure")
    assert re.match(
        r"p50 is \S+ ms, the bound is 0 ms|p50 is \S+ ms, the bound is 0\.0000 ms",
        failure.get("message", ""),
    )


def test_a_report_is_written(served: Running, run: Run) -> None:
    options = shlex.split(
        f"--against {served.address('predictions')} --model echo --input-kind text"
    )
    result = run("bench", *options, *SHORT_LOAD, "--output", "out", "--json", "-")
    assert (result.code, json.loads(result.out)["against"]) == (0, options[1])
    assert {file.name for file in Path("out").iterdir()} == {
        "report.html",
        "report.md",
        "results.csv",
        "results.json",
    }
    assert f"Measured at: **{options[1]}**" in Path("out/report.md").read_text()


def test_a_token_is_sent_but_never_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    authorizations: set[bytes] = set()
    Path("token").write_text("secret\n")
    with scripted(
        lambda _, request: [authorizations.add(request.headers.get(b"authorization", b"")) or OK]
    ) as url:
        options = ("--against", url, "--model", "m", "--input-kind", "text")
        assert (
            run("bench", *options, *SHORT_LOAD, "--token", "@token", "--json", "out.json").code == 0
        )
    assert authorizations == {b"Bearer secret"}
    assert "secret" not in Path("out.json").read_text()
    monkeypatch.setattr(sys, "argv", ["tsx", "bench", "--token", "secret"])
    assert command_line("secret") == "tsx bench --token ..."
    monkeypatch.setattr(sys, "argv", ["tsx", "--token", "it's", "bad\udcff.mar"])
    assert command_line("it's") == "tsx --token ... 'bad\\udcff.mar'"
    assert command_line("") == command_line(None)


def test_a_server_that_refuses_every_request_is_an_error_with_its_reason(
    served: Running, run: Run
) -> None:
    Path("x").write_text("x")
    result = run(
        *shlex.split(f"bench --against {served.address('predictions')} --model ehco --input x"),
        *SHORT_LOAD,
    )
    assert result.code == 1
    assert "accepted no request: 404" in result.err
    assert "'ehco'" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--against http://h", "--model NAME"),
        ("--against http://h --model m", "--input FILE"),
        ("--against ftp://h --model m --input-kind text", "is not the address of a server"),
        (f"{BASE_OPTIONS} --warm-up long", "--warm-up: 'long' is not a time"),
        (f"{BASE_OPTIONS} --slo 'p42<1ms'", "--slo: 'p42<1ms'"),
        (f"{BASE_OPTIONS} --arrivals constant", "needs a rate"),
        (f"{BASE_OPTIONS} --rounds 0", "--rounds: 0"),
        ("--against http://h --model m --input-shape x", "--input-shape"),
        ("--against http://a..b --model m --input-kind text", "is not the address of a server"),
        (f"{BASE_OPTIONS} --json none/x.json", "--json: 'none/x.json' cannot be a file"),
        ("--against 'http://a b' --model m --input-kind text", "is not the address of a server"),
        (f"{BASE_OPTIONS} --token 'a\r\nb: c'", "a token is one word"),
        (f"{BASE_OPTIONS} --token ''", "a token is one word"),
        (f"{BASE_OPTIONS} --content-type a/b", "--content-type applies to --input only"),
        (f"{BASE_OPTIONS} --speed 2 --rate 9", "--speed is that of a recording"),
        (
            f"{BASE_OPTIONS} --certificate c.pem",
            "--certificate: 'http://h' is not an https address",
        ),
        (f"{BASE_OPTIONS} --ramp --rate 9", "--ramp chooses the rates itself"),
        (f"{BASE_OPTIONS} --junit out.xml", "--junit reports what is judged"),
        (
            f"{BASE_OPTIONS} --junit no/out.xml --slo 'p50<1s'",
            "--junit: 'no/out.xml' cannot be a file",
        ),
        (f"{BASE_OPTIONS} --generator-cores 4000", "--generator-cores: "),
        (f"{BASE_OPTIONS} --price-per-hour inf", "--price-per-hour: inf is not a number"),
        (f"{BASE_OPTIONS} model.mar", "unexpected extra argument"),
    ],
)
def test_an_invalid_option_gets_a_remedy(run: Run, options: str, message: str) -> None:
    result = run("bench", *shlex.split(options))
    assert result.code == 2, result.err
    assert message in result.err


def test_both_variants_of_the_command_have_help(run: Run) -> None:
    help_text = run("bench", "--help").out
    assert "--against" in help_text
    assert "poisson, if not given, constant or recorded" in " ".join(
        help_text.replace("│", "").split()
    )
    assert "--protocol" in run("bench", "--against=x", "--help").out


def test_a_missing_server_and_a_missing_token_file_are_reported(run: Run) -> None:
    options = (
        *shlex.split("bench --against http://127.0.0.1:9 --model m --input-kind text"),
        *SHORT_LOAD,
    )
    assert "no server answers at http://127.0.0.1:9" in run(*options).err
    assert "--token: gone cannot be read" in run(*options, "--token", "@gone").err
