"""Complete searches on simulated machines: the quality of the choice, and the use of the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.simulated_bench import (
    Others,
    RecordedMachine,
    SimulatedMachine,
    bursts,
    hog,
    quiet,
    search,
)
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Results
from tsx_cli.bench.search.search import GROUP_SIZE

pytestmark = pytest.mark.slow
BASELINE = Configuration(precision="fp32")


def throughput_fraction(machine: SimulatedMachine, results: Results) -> float:
    """Return the choice's throughput as a fraction of the best on the quiet machine."""
    if results.winner is None:
        return 0.0
    return machine.best(results.trials[results.winner].as_configuration()) / max(
        map(machine.best, machine.space)
    )


@pytest.mark.parametrize(
    ("disturbance", "drift", "seconds"),
    [(quiet, 0.2, 60), (bursts, 0.05, 150), (hog, 0.0, 120)],
    ids=["drifting", "bursts", "permanent"],
)
def test_the_choice_is_near_the_best_in_two_of_three_runs(
    tmp_path: Path, disturbance: Callable[[int], Others] | Others, drift: float, seconds: float
) -> None:
    shares = []
    for seed in range(3):
        load: Others = bursts(seed) if disturbance is bursts else disturbance  # type: ignore[assignment]
        machine = SimulatedMachine(seed, load, drift)
        results = search(machine, seconds, tmp_path / str(seed))
        shares.append(throughput_fraction(machine, results))
        assert machine.now <= 1.03 * seconds
        assert bool(results.disturbed.says) == (disturbance is not quiet)
    assert sum(share >= 0.9 for share in shares) >= 2, shares


@pytest.mark.parametrize(("seed", "bound_ms"), [(0, 30), (1, 100)])
def test_a_near_best_recorded_configuration_is_chosen_with_few_rounds(
    tmp_path: Path, seed: int, bound_ms: float
) -> None:
    machine = RecordedMachine(seed, bound_ms=bound_ms)
    results = search(machine, 300, tmp_path)
    assert throughput_fraction(machine, results) >= 0.9
    assert len(machine.log) < 319 / 3, "the whole table took 319 rounds"


@settings(
    max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.integers(0, 10_000), st.sampled_from([30, 45, 60, 100, 150]), st.booleans())
def test_new_configurations_are_measured_before_any_is_repeated(
    tmp_path_factory: pytest.TempPathFactory, seed: int, seconds: float, noisy: bool
) -> None:
    machine = SimulatedMachine(seed, bursts(seed) if noisy else quiet)
    results = search(machine, seconds, tmp_path_factory.mktemp("run"))
    order = [configuration for _, configuration, _ in machine.log]
    configurations = list(dict.fromkeys(order))
    assert order[0] == BASELINE
    # On a noisy machine, a disturbed round is repeated at once.
    if not noisy:
        new = configurations[: GROUP_SIZE + 1]
        assert order[: len(new)] == new or len(configurations) <= GROUP_SIZE, (
            "nothing twice, unless there is no time for another server"
        )
        assert order[: len(new)].count(BASELINE) == 1
    assert machine.now <= 1.1 * seconds
    assert len(configurations) >= min(GROUP_SIZE + 1, seconds // 12)
    if results.winner is not None and results.trials[results.winner].as_configuration() == BASELINE:
        assert len(configurations) > 2, "the baseline alone is no choice"


@pytest.mark.parametrize("seconds", [30, 60, 150])
def test_no_time_is_reserved_for_an_impossible_comparison(tmp_path: Path, seconds: float) -> None:
    machine = SimulatedMachine(3)
    search(machine, seconds, tmp_path / "run")
    assert machine.now > 0.85 * seconds
    configurations = [configuration for _, configuration, _ in machine.log]
    assert configurations.count(BASELINE) <= 4, "only as often as its comparison needs"


def test_a_single_configuration_is_repeated_until_it_is_precise(tmp_path: Path) -> None:
    machine = SimulatedMachine(3)
    results = search(
        machine, 60, tmp_path / "run", workers="1", batch_sizes="1", precisions=None, threads="1"
    )
    assert results.winner == 0
    assert len(results.trials[0].points[results.trials[0].best or 0].rounds) >= 3


def test_an_exhaustive_search_repeats_each_best_load(
    tmp_path: Path,
) -> None:
    machine = SimulatedMachine(5)
    results = search(
        machine,
        math.inf,
        tmp_path / "run",
        exhaustive=True,
        workers="1,2",
        batch_sizes="1,8",
        duration=1.0,
    )
    assert all(trial.state == "measured" for trial in results.trials)
    for trial in results.trials:
        assert trial.chosen is None or len(trial.chosen.rounds) >= 2, trial.as_configuration()
    assert throughput_fraction(machine, results) >= 0.85
