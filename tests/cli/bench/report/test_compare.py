"""Comparisons of two benchmarks: real differences, noise, and conditions for failure."""

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
from tsx_cli.common.failure import UsageError
from tsx_cli.main import run
from tsx_cli.plan.planning import read_measurements

pytestmark = pytest.mark.slow


LOADS = (1, 2)


@pytest.fixture(autouse=True, scope="module")
def _fewer_draws() -> Iterator[None]:
    """Use only 60 bootstrap draws; tests/cli/bench/load/test_statistics.py covers the intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tsx_cli.bench.load.statistics.BOOTSTRAP_DRAWS", 60)
        yield


@pytest.fixture(scope="module")
def baseline() -> Results:
    return results(loads=LOADS)


@pytest.fixture(scope="module")
def slower() -> Results:
    return results(speed=0.85, seed=7, loads=LOADS)


@pytest.fixture(scope="module")
def repeated() -> Results:
    return results(seed=50, loads=LOADS)


def test_two_servers_are_reported_by_both_addresses(baseline: Results, slower: Results) -> None:
    trial = Trial(configuration={}, points=baseline.trials[0].points[:1], best=0)
    first = with_trials(baseline, trial, against="http://theirs")
    second = with_trials(slower, trial, against="http://ours")
    comparison = compare(first, second)
    assert [pair.name for pair in comparison.pairs] == ["http://theirs -> http://ours"]
    assert "the server differs: http://theirs, http://ours" in comparison.notes


def test_a_drop_beyond_the_limit_fails_the_comparison(baseline: Results, slower: Results) -> None:
    comparison = compare(baseline, slower, [parse_condition("throughput<-5%")])
    assert len(comparison.met) == 1
    assert comparison.met[0].startswith("throughput<-5%: throughput -")
    assert f"({BEST}, 2 connections)" in comparison.met[0]
    assert not compare(baseline, slower, [parse_condition("throughput<-50%")]).met
    assert not compare(slower, baseline, [parse_condition("throughput<-5%")]).met


def test_a_change_within_the_noise_does_not_fail_the_comparison(
    baseline: Results, repeated: Results
) -> None:
    comparison = compare(
        baseline,
        repeated,
        [parse_condition("throughput<-0.01%"), parse_condition("throughput>0.01%")],
    )
    change = next(change for change in comparison.pairs[0].changes if change.figure == "throughput")
    assert abs(change.change) > 0.0001
    assert change.sure is False
    assert not comparison.met


def test_equal_configurations_are_paired_by_their_load(baseline: Results, slower: Results) -> None:
    fewer_trials = slower.model_copy(
        update={"trials": [slower.trials[3], slower.trials[0]], "winner": 0, "baseline": 1}
    )
    comparison = compare(baseline, fewer_trials)
    assert [pair.name for pair in comparison.pairs[:2]] == [
        BEST,
        "cpu, 2 workers, 1 thread, batch 4",
    ]
    assert {pair.name for pair in comparison.pairs[1:]} == {
        "cpu, 2 workers, 1 thread, batch 4",
        "cpu, 1 worker, batch 1",
    }
    assert len(comparison.pairs) == 1 + 2 * len(LOADS)


def test_conditions_apply_only_to_the_best_unless_all_are_requested(baseline: Results) -> None:
    slower_baseline = baseline.model_copy(deep=True)
    slower_baseline.trials[0] = results(speed=0.5, loads=LOADS).trials[0]
    condition = [parse_condition("throughput<-5%")]
    assert not compare(baseline, slower_baseline, condition).met
    assert len(compare(baseline, slower_baseline, condition, all_pairs=True).met) == len(LOADS)


def test_running_servers_are_compared_by_their_load(baseline: Results) -> None:
    def results_of_server(rate: float, repeats: int) -> Results:
        trial = Trial(
            configuration={},
            points=[point(8, [one_round(rate, 10, seed) for seed in range(repeats)])],
            best=0,
        )
        return with_trials(baseline, trial, against="http://h")

    condition = [parse_condition("throughput < -5 %")]
    assert compare(results_of_server(100, 3), results_of_server(80, 3), condition).met
    single_round = compare(results_of_server(100, 1), results_of_server(80, 1), condition)
    assert single_round.met, "what was measured once counts as it is"
    assert single_round.pairs[0].changes[0].sure is None
    assert any("one round" in note for note in single_round.notes)


def test_errors_are_compared_in_percentage_points(baseline: Results) -> None:
    def results_of_server(errors: int) -> Results:
        trial = Trial(
            configuration={},
            points=[point(8, [one_round(100, 10, seed, errors=errors) for seed in range(3)])],
            best=0,
        )
        return with_trials(baseline, trial)

    assert compare(results_of_server(0), results_of_server(30), [parse_condition("errors>1%")]).met
    assert not compare(
        results_of_server(0), results_of_server(5), [parse_condition("errors>1%")]
    ).met
    assert "errors" in [
        change.figure
        for change in compare(results_of_server(0), results_of_server(5)).pairs[0].changes
    ]


def test_other_figures_are_computed_from_the_rounds(baseline: Results) -> None:
    conditions = [parse_condition(text) for text in ("p99.9>1%", "p50>5%", "mean>5%")]
    comparison = compare(baseline, results(speed=0.3, loads=LOADS), conditions, all_pairs=True)
    assert [change.figure for change in comparison.pairs[0].changes] == [
        "throughput",
        "mean",
        "p50",
        "p99",
        "p99.9",
    ]
    assert any(reason.startswith("p50>5%: p50 +") for reason in comparison.met)


def test_incomparable_conditions_are_reported(baseline: Results, slower: Results) -> None:
    changed = slower.model_copy(deep=True)
    changed.environment.fingerprint = "elsewhere"
    changed.slo = "p99<50ms"
    changed.winner = 2
    changed.complete = False
    notes = "\n".join(compare(baseline, changed).notes)
    for warning in (
        "different machines",
        "the bound differs: p99<100ms, p99<50ms",
        "what is best has changed from",
        "second is incomplete",
    ):
        assert warning in notes


def test_a_run_without_loads_is_a_usage_error(baseline: Results) -> None:
    with pytest.raises(UsageError, match=r"nothing to compare.* the second \[\]"):
        compare(baseline, with_trials(baseline))


def test_the_error_for_runs_without_common_loads_lists_them(baseline: Results) -> None:
    with pytest.raises(UsageError) as caught:
        compare(*(with_trials(baseline, trial) for trial in baseline.trials[:2]))
    for trial in baseline.trials[:2]:
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
def test_invalid_conditions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a condition"):
        parse_condition(text)


@pytest.mark.parametrize("text", ["throughput>-5%", "throughput<5%", "p99<10%"])
def test_a_condition_that_holds_without_a_change_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="where nothing has changed"):
        parse_condition(text)


def test_a_comparison_is_printed_as_text_or_json(
    baseline: Results, slower: Results, repeated: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions = [parse_condition("throughput<-5%")]
    show_compared(compare(baseline, slower, conditions))
    output = capsys.readouterr().out
    assert "best" in output
    assert "Failed: throughput<-5%: throughput -" in output
    show_compared(compare(baseline, repeated))
    assert "within the noise" in capsys.readouterr().out
    print_compared(compare(baseline, slower, conditions))
    output_json = json.loads(capsys.readouterr().out)
    assert len(output_json["failed"]) == 1
    assert output_json["pairs"][0]["configuration"] == "best"
    assert output_json["pairs"][0]["changes"][0]["sure"] is True


@pytest.fixture(scope="module")
def files(baseline: Results, slower: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compare")
    for name, measured in (("before", baseline), ("after", slower)):
        (directory / name).mkdir()
        (directory / name / "results.json").write_text(measured.model_dump_json())
    (directory / "damaged.json").write_text('{"format": 1, "trials": 3}')
    return directory


def command(*arguments: object) -> int:
    app = typer.Typer()
    app.command()(compare_command)
    return run(typer.main.get_command(app), "compare", [str(argument) for argument in arguments])


def test_the_exit_code_tells_whether_a_condition_is_met(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_paths = files / "before", files / "after" / "results.json"
    assert command(*result_paths) == 0
    assert command(*result_paths, "--fail-if", "throughput<-50%", "--json") == 0
    assert command(*result_paths, "--fail-if", "throughput<-5%") == 1
    assert "Failed: throughput<-5%" in capsys.readouterr().out
    assert command(*reversed(result_paths), "--fail-if", "throughput<-5%", "--all") == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("before", "absent.json"), "cannot be read"),
        (("before", "damaged.json"), "is damaged"),
        (("before", "after", "--fail-if", "speed<-5%"), "is not a condition"),
    ],
)
def test_invalid_files_and_conditions_exit_with_another_code_than_regressions(
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


def without_new_fields(value: Any) -> Any:
    """Return a value without the fields that the previous version did not write."""
    new_fields = {
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
        return {
            name: without_new_fields(item) for name, item in value.items() if name not in new_fields
        }
    return [without_new_fields(item) for item in value] if isinstance(value, list) else value


def test_results_of_the_previous_version_can_be_read(baseline: Results, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(without_new_fields(baseline.model_dump(mode="json"))))
    assert compare(read_results(file), baseline).pairs == compare(baseline, baseline).pairs
    measurements = read_measurements(None, file)
    assert (
        ArchiveRecord.model_validate(without_new_fields(json.loads(measurements.content())))
        == measurements
    )
