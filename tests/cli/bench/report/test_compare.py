"""Comparisons of two benchmarks: real differences, apparent ones, and reasons to fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.benchmarked import one_round, point, results, with_trials
from tsx_cli.bench.commands.compare_command import compare_command
from tsx_cli.bench.load.results import Results, Trial, read_results
from tsx_cli.bench.report.archive_record import ArchiveRecord
from tsx_cli.bench.report.compare import (
    BEST,
    compare,
    parse_condition,
    print_compared,
    show_compared,
)
from tsx_cli.bench.report.planning import read_measurements
from tsx_cli.common.failure import UsageError
from tsx_cli.main import run

pytestmark = pytest.mark.slow


LOADS = (1, 2)


@pytest.fixture(autouse=True, scope="module")
def _fewer_draws() -> Iterator[None]:
    """Draw 60 times only: tests/cli/bench/load/test_statistics.py covers the intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tsx_cli.bench.load.statistics.BOOTSTRAP_DRAWS", 60)
        yield


@pytest.fixture(scope="module")
def before() -> Results:
    return results(loads=LOADS)


@pytest.fixture(scope="module")
def slower() -> Results:
    return results(speed=0.85, seed=7, loads=LOADS)


@pytest.fixture(scope="module")
def again() -> Results:
    return results(seed=50, loads=LOADS)


def test_two_servers_are_reported_by_both_addresses(before: Results, slower: Results) -> None:
    trial = Trial(configuration={}, points=before.trials[0].points[:1], best=0)
    first = with_trials(before, trial, against="http://theirs")
    second = with_trials(slower, trial, against="http://ours")
    reported = compare(first, second)
    assert [pair.name for pair in reported.pairs] == ["http://theirs -> http://ours"]
    assert "the server differs: http://theirs, http://ours" in reported.notes


def test_a_fall_beyond_the_limit_is_a_reason_to_fail(before: Results, slower: Results) -> None:
    reported = compare(before, slower, [parse_condition("throughput<-5%")])
    assert len(reported.met) == 1
    assert reported.met[0].startswith("throughput<-5%: throughput -")
    assert f"({BEST}, 2 connections)" in reported.met[0]
    assert not compare(before, slower, [parse_condition("throughput<-50%")]).met
    assert not compare(slower, before, [parse_condition("throughput<-5%")]).met


def test_a_change_within_the_noise_is_no_reason_to_fail(before: Results, again: Results) -> None:
    reported = compare(
        before, again, [parse_condition("throughput<-0.01%"), parse_condition("throughput>0.01%")]
    )
    change = next(change for change in reported.pairs[0].changes if change.figure == "throughput")
    assert abs(change.change) > 0.0001
    assert change.sure is False
    assert not reported.met


def test_equal_configurations_are_paired_by_their_load(before: Results, slower: Results) -> None:
    less = slower.model_copy(
        update={"trials": [slower.trials[3], slower.trials[0]], "winner": 0, "baseline": 1}
    )
    reported = compare(before, less)
    assert [pair.name for pair in reported.pairs[:2]] == [BEST, "cpu, 2 workers, 1 thread, batch 4"]
    assert {pair.name for pair in reported.pairs[1:]} == {
        "cpu, 2 workers, 1 thread, batch 4",
        "cpu, 1 worker, batch 1",
    }
    assert len(reported.pairs) == 1 + 2 * len(LOADS)


def test_conditions_are_for_the_best_alone_unless_all_are_asked_for(before: Results) -> None:
    worse = before.model_copy(deep=True)
    worse.trials[0] = results(speed=0.5, loads=LOADS).trials[0]
    condition = [parse_condition("throughput<-5%")]
    assert not compare(before, worse, condition).met
    assert len(compare(before, worse, condition, all_pairs=True).met) == len(LOADS)


def test_servers_that_ran_already_are_compared_by_their_load(before: Results) -> None:
    def ran(rate: float, repeats: int) -> Results:
        trial = Trial(
            configuration={},
            points=[point(8, [one_round(rate, 10, seed) for seed in range(repeats)])],
            best=0,
        )
        return with_trials(before, trial, against="http://h")

    condition = [parse_condition("throughput < -5 %")]
    assert compare(ran(100, 3), ran(80, 3), condition).met
    once = compare(ran(100, 1), ran(80, 1), condition)
    assert once.met, "what was measured once counts as it is"
    assert once.pairs[0].changes[0].sure is None
    assert any("one round" in note for note in once.notes)


def test_errors_are_compared_in_percentage_points(before: Results) -> None:
    def ran(errors: int) -> Results:
        trial = Trial(
            configuration={},
            points=[point(8, [one_round(100, 10, seed, errors=errors) for seed in range(3)])],
            best=0,
        )
        return with_trials(before, trial)

    assert compare(ran(0), ran(30), [parse_condition("errors>1%")]).met
    assert not compare(ran(0), ran(5), [parse_condition("errors>1%")]).met
    assert "errors" in [change.figure for change in compare(ran(0), ran(5)).pairs[0].changes]


def test_other_figures_are_taken_from_the_rounds(before: Results) -> None:
    conditions = [parse_condition(text) for text in ("p99.9>1%", "p50>5%", "mean>5%")]
    reported = compare(before, results(speed=0.3, loads=LOADS), conditions, all_pairs=True)
    assert [change.figure for change in reported.pairs[0].changes] == [
        "throughput",
        "mean",
        "p50",
        "p99",
        "p99.9",
    ]
    assert any(reason.startswith("p50>5%: p50 +") for reason in reported.met)


def test_doubts_about_a_comparison_are_reported(before: Results, slower: Results) -> None:
    after = slower.model_copy(deep=True)
    after.environment.fingerprint = "elsewhere"
    after.slo = "p99<50ms"
    after.winner = 2
    after.complete = False
    notes = "\n".join(compare(before, after).notes)
    for reported in (
        "different machines",
        "the bound differs: p99<100ms, p99<50ms",
        "what is best has changed from",
        "second is incomplete",
    ):
        assert reported in notes


def test_a_run_without_loads_is_wrong_usage(before: Results) -> None:
    with pytest.raises(UsageError, match=r"nothing to compare.* the second \[\]"):
        compare(before, with_trials(before))


def test_runs_with_nothing_in_common_are_reported_with_their_loads(before: Results) -> None:
    with pytest.raises(UsageError) as caught:
        compare(*(with_trials(before, trial) for trial in before.trials[:2]))
    for trial in before.trials[:2]:
        measured = "; ".join(
            f"{trial.as_configuration()}, {point.offered}" for point in trial.points
        )
        assert f"[{measured}]" in caught.value.message
    assert "the same --batch-sizes" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "throughput",
        "throughput<5",
        "speed<-5%",
        "throughput=-5%",
        "p99<10ms",
        "throughput<-5%,p99>10%",
    ],
)
def test_other_texts_are_no_conditions(text: str) -> None:
    with pytest.raises(UsageError, match="is not a condition"):
        parse_condition(text)


@pytest.mark.parametrize("text", ["throughput>-5%", "throughput<5%", "p99<10%"])
def test_a_condition_that_nothing_meets_by_changing_is_reported(text: str) -> None:
    with pytest.raises(UsageError, match="where nothing has changed"):
        parse_condition(text)


def test_people_and_programs_are_reported(
    before: Results, slower: Results, again: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions = [parse_condition("throughput<-5%")]
    show_compared(compare(before, slower, conditions))
    reported = capsys.readouterr().out
    assert "best" in reported
    assert "Failed: throughput<-5%: throughput -" in reported
    show_compared(compare(before, again))
    assert "within the noise" in capsys.readouterr().out
    print_compared(compare(before, slower, conditions))
    parsed = json.loads(capsys.readouterr().out)
    assert len(parsed["failed"]) == 1
    assert parsed["pairs"][0]["configuration"] == "best"
    assert parsed["pairs"][0]["changes"][0]["sure"] is True


@pytest.fixture(scope="module")
def files(before: Results, slower: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compare")
    for name, reported in (("before", before), ("after", slower)):
        (directory / name).mkdir()
        (directory / name / "results.json").write_text(reported.model_dump_json())
    (directory / "damaged.json").write_text('{"format": 1, "trials": 3}')
    return directory


def command(*arguments: object) -> int:
    app = typer.Typer()
    app.command()(compare_command)
    return run(typer.main.get_command(app), "compare", [str(argument) for argument in arguments])


def test_the_exit_code_is_for_ci(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = files / "before", files / "after" / "results.json"
    assert command(*both) == 0
    assert command(*both, "--fail-if", "throughput<-50%", "--json") == 0
    assert command(*both, "--fail-if", "throughput<-5%") == 1
    assert "Failed: throughput<-5%" in capsys.readouterr().out
    assert command(*reversed(both), "--fail-if", "throughput<-5%", "--all") == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("before", "absent.json"), "cannot be read"),
        (("before", "damaged.json"), "is damaged"),
        (("before", "after", "--fail-if", "speed<-5%"), "is not a condition"),
    ],
)
def test_wrong_files_and_words_are_distinguished_from_a_regression(
    files: Path, arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command(
            *(
                files / argument if number < 2 else argument
                for number, argument in enumerate(arguments)
            )
        )
        == 2
    )
    assert problem in capsys.readouterr().err


def older(value: Any) -> Any:
    """Return a value without the fields that the version before did not write."""
    added = {
        "over_time",
        "by_size",
        "noise",
        "disturbed",
        "starts",
        "tied",
        "price_per_hour",
        "pinning",
    }
    if isinstance(value, dict):
        return {name: older(item) for name, item in value.items() if name not in added}
    return [older(item) for item in value] if isinstance(value, list) else value


def test_results_of_the_version_before_are_compared_and_planned_from(
    before: Results, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(older(before.model_dump(mode="json"))))
    assert compare(read_results(file), before).pairs == compare(before, before).pairs
    measurements = read_measurements(None, file)
    assert ArchiveRecord.model_validate(older(json.loads(measurements.content()))) == measurements
