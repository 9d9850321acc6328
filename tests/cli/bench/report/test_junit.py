"""Verdicts as JUnit XML."""

from __future__ import annotations

import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.benchmarked import one_round, point, results, with_trials
from tsx_cli.bench.load.results import Results, Trial
from tsx_cli.bench.report.compare import compare, parse_condition
from tsx_cli.bench.report.junit import bound_cases, check_junit, condition_cases, write_junit
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.main import main


def failures(measured: Results) -> dict[str, str | None]:
    return {case.name: case.failure for case in bound_cases(measured)}


def test_each_limit_of_the_winner_is_a_test_case() -> None:
    measured = results(slo="p99<100ms,p50<50ms,errors<0.1%")
    assert failures(measured) == {
        "a configuration is chosen": None,
        "p99<100ms": None,
        "p50<50ms": None,
        "errors<0.1%": None,
    }
    assert "errors<=0%" in failures(results(slo="p99<100ms"))


def test_a_missed_limit_fails_with_the_figures_of_the_closest_load() -> None:
    measured = results(slo="p99<1ms,mean<10s")
    measured.winner, measured.why = None, "No configuration holds p99<1ms."
    for trial in measured.trials:
        trial.best = None
    problems = failures(measured)
    assert problems["a configuration is chosen"] == "No configuration holds p99<1ms."
    assert problems["mean<10s"] is None
    assert str(problems["p99<1ms"]).startswith("p99 is 7")
    assert " ms ± " in str(problems["p99<1ms"])
    assert "the bound is 1.00 ms (cpu, " in str(problems["p99<1ms"])
    measured.trials = []
    assert failures(measured)["mean<10s"] == "nothing was measured"


def test_a_lagging_or_failing_server_is_a_failure() -> None:
    measured = results(slo="p99<100ms")
    lagging_point = point(256, [one_round(50, 10, 0)], rate=100.0).model_copy(
        update={"holds": False}
    )
    trial = Trial(configuration={}, points=[lagging_point])
    measured = with_trials(measured, trial, against="http://h")
    assert str(failures(measured)["the throughput follows the rate"]).startswith(
        "the server falls behind: "
    )
    lagging_point.error_rate = 0.02
    assert failures(measured) == {
        "p99<100ms": None,
        "errors<=0%": "2.00% of the requests failed, the bound is 0 (http://h, 100 requests/s, poisson)",
        "the throughput follows the rate": None,
    }
    lagging_point.throughput.value = 0.0
    assert set(failures(measured).values()) == {"no request was answered (100 requests/s, poisson)"}


def test_the_file_is_junit_xml(tmp_path: Path) -> None:
    measured = results(slo="p99<1ms")
    measured.model.name = "<a&b>\x1b\0\ufffe]]>"
    write_junit(str(tmp_path / "out.xml"), bound_cases(measured), measured)
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    (suite,) = root
    assert (root.tag, suite.tag, suite.get("timestamp")) == (
        "testsuites",
        "testsuite",
        "2026-11-21T15:00:00",
    )
    assert (root.get("skipped"), suite.get("skipped")) == (None, "0"), (
        "the schema has it for a suite only"
    )
    for element in (root, suite):
        assert (
            element.get("tests"),
            element.get("failures"),
            element.get("errors"),
            element.get("time"),
        ) == ("3", "1", "0", "581.000")
    assert {case.tag for case in suite} == {"testcase"}
    assert suite[0].get("classname") == "<a&b>\\x1b\\x00\\ufffe]]> 1.0"
    (failure,) = suite.iter("failure")
    assert failure.get("message") == failure.text
    assert str(failure.text).startswith("p99 is ")
    with pytest.raises(CliError, match="cannot be written"):
        write_junit(str(tmp_path / "none" / "out.xml"), [], measured)


def test_each_condition_and_row_of_a_comparison_is_a_test_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tsx_cli.bench.load.statistics.BOOTSTRAP_DRAWS", 60)
    conditions = [parse_condition("throughput<-5%"), parse_condition("p99>10000%")]
    baseline, slower = results(loads=(1, 2)), results(speed=0.5, loads=(1, 2))
    compared = compare(baseline, slower, conditions)
    cases = condition_cases(compared, baseline)
    assert [(case.name, case.failure is None) for case in cases] == [
        ("not throughput<-5%", False),
        ("not p99>10000%", True),
    ]
    assert str(cases[0].failure).startswith("throughput -")
    assert cases[0].group.startswith("detector 1.0: best, ")
    every = compare(baseline, slower, conditions, all_pairs=True)
    assert len(condition_cases(every, baseline)) == 2 * len(every.pairs)


def test_the_compare_command_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_cli.bench.load.statistics.BOOTSTRAP_DRAWS", 60)
    for name, speed in (("a", 1.0), ("b", 0.5)):
        (tmp_path / name).write_text(results(speed=speed, loads=(1, 2)).model_dump_json())
    command = shlex.split(
        f"bench compare {tmp_path / 'a'} {tmp_path / 'b'} --junit {tmp_path / 'out.xml'}"
    )
    assert main(command) == 2
    assert "give --fail-if" in capsys.readouterr().err
    assert main([*command, "--fail-if", "throughput<-5%"]) == 1
    assert ElementTree.parse(tmp_path / "out.xml").getroot().get("failures") == "1"


def test_an_impossible_path_is_refused_before_measuring(tmp_path: Path) -> None:
    check_junit(str(tmp_path / "out.xml"), "p99<1ms", "--slo")
    for file in (tmp_path, tmp_path / "none" / "out.xml"):
        with pytest.raises(UsageError, match="cannot be a file"):
            check_junit(str(file), "p99<1ms", "--slo")
