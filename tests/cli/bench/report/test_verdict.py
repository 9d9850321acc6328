"""The conclusion of a run follows from its own table."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.bench.search.test_confirm import SLO, one_round, results_of
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import (
    OUT_OF_TIME,
    OUTDONE,
    Noise,
    OfferedLoad,
    PairedComparison,
    Point,
    Prediction,
    Results,
    Round,
    Trial,
)
from tsx_cli.bench.report.facts import heading
from tsx_cli.bench.report.shown import number, ordered
from tsx_cli.bench.report.verdict import conclude
from tsx_cli.bench.search.points import EQUAL_RATIO, choose, with_round
from tsx_cli.bench.search.search import ranking
from tsx_cli.common.output import rounded

HIGHEST, FEWEST, LOWEST = "highest", "fewest workers", "lowest p99"


def disturbed(round: Round, cores: float) -> Round:
    return round.model_copy(
        update={
            "noise": Noise(cores=1.0, others=cores),
            "disturbed": ["other processes used 1 core (limit 0.1)"],
        }
    )


def results_with_conclusion(trials: list[Trial], pairs: list[PairedComparison]) -> Results:
    results = results_of(trials)
    results.winner, results.tied = choose(ranking(trials), trials.__getitem__, pairs)
    results.paired = [pair for pair in pairs if pair.first == results.winner]
    conclude(results)
    return results


rounds = st.builds(
    lambda rate, p99, cores: (
        one_round(rate, p99) if cores is None else disturbed(one_round(rate, p99), cores)
    ),
    st.integers(1000, 1300),
    st.sampled_from([5.0, 20.0, 49.0, 70.0]),
    st.none() | st.floats(0, 2),
)


@st.composite
def tables(draw: st.DrawFn) -> list[Trial]:
    trials = []
    for size in range(draw(st.integers(1, 5))):
        trial = Trial(
            configuration=Configuration(
                workers=draw(st.integers(1, 4)), batch_size=size + 1
            ).as_json()
        )
        for connections, measured in draw(
            st.lists(st.tuples(st.sampled_from([2, 8]), rounds), min_size=1, max_size=5)
        ):
            with_round(trial.points, OfferedLoad(connections=connections), measured, SLO)
        trials.append(trial)
    return trials


@st.composite
def comparisons(draw: st.DrawFn, trials: int) -> list[PairedComparison]:
    pairs = []
    for first in range(trials):
        for second in range(first):
            ratio, real = draw(st.floats(0.8, 1.25)), draw(st.booleans())
            if draw(st.booleans()):
                pairs.append(
                    PairedComparison(
                        first=first,
                        second=second,
                        ratio=ratio,
                        low=ratio * 0.99,
                        high=ratio * 1.01,
                        real=real,
                    )
                )
    return pairs


@given(st.data())
def test_the_best_row_wins_and_the_sentence_has_its_figures(data: st.DataObject) -> None:
    trials = data.draw(tables())
    pairs = data.draw(st.just([]) | comparisons(len(trials)))
    results = results_with_conclusion(trials, pairs)
    rows: dict[int, Point] = {
        position: point
        for position, trial in enumerate(trials)
        if (point := trial.chosen) is not None
    }
    if not rows:
        assert results.winner is None
        return
    assert results.winner is not None
    chosen = rows[results.winner]
    assert chosen.holds

    all_disturbed = all(any(round.disturbed for round in point.counted) for point in rows.values())
    if not all_disturbed and not any(pair.real for pair in pairs):
        assert chosen.throughput.value >= EQUAL_RATIO**2 * max(
            point.throughput.value for point in rows.values()
        )

    reason = results.why.partition("requests/s")[0] if not results.tied else results.why
    if HIGHEST in reason or "Highest" in heading(results):
        assert chosen.throughput.value == max(point.throughput.value for point in rows.values())
    tied = [trials[position] for position in results.tied]
    if FEWEST in reason:
        assert all(
            trials[results.winner].as_configuration().workers < trial.as_configuration().workers
            for trial in tied
        )
    if LOWEST in reason:
        assert all(
            chosen.latency.p99_ms <= rows[position].latency.p99_ms for position in results.tied
        )
    figures = set(re.findall(r"([\d,.]+) requests/s with", results.why))
    assert figures == {rounded(chosen.throughput.value)}
    assert ordered(results)[0] == results.winner
    assert number(chosen.throughput.value) == rounded(chosen.throughput.value)


def trial(workers: int, *measured: Round, connections: int = 8) -> Trial:
    trial = Trial(configuration=Configuration(workers=workers).as_json())
    for round in measured:
        with_round(trial.points, OfferedLoad(connections=connections), round, SLO)
    return trial


@pytest.mark.parametrize(
    "two_workers",
    [
        lambda: trial(2, one_round(12414, 8), one_round(12414, 8)),
        lambda: trial(2, *2 * [disturbed(one_round(12414, 8), 0.5)]),
    ],
    ids=["measured again", "disturbed, and more for the processor time that it got"],
)
def test_an_undisturbed_row_that_is_far_higher_wins(two_workers: Callable[[], Trial]) -> None:
    results = results_with_conclusion([trial(1, one_round(15403, 4)), two_workers()], [])
    assert (results.winner, results.tied) == (0, [])
    assert "1 worker, batch 1 has the highest" in results.why
    assert "15,403 requests/s" in results.why


@pytest.mark.parametrize(
    ("reasons", "rates", "sentence"),
    [
        ([OUT_OF_TIME, OUTDONE], [900, 2000], "2 configurations that may be faster were"),
        ([OUTDONE], [2000], "1 configuration that may be faster was"),
        ([OUTDONE, "it does not load"], [900, 2000], ""),
    ],
)
def test_the_conclusion_says_how_many_configurations_may_be_faster(
    reasons: list[str], rates: list[float], sentence: str
) -> None:
    unmeasured = [
        Trial(
            configuration=Configuration(workers=9, batch_size=size + 1).as_json(),
            state="predicted",
            reason=reason,
            predicted=Prediction(throughput=rate, p99_ms=2),
        )
        for size, (reason, rate) in enumerate(zip(reasons, rates, strict=True))
    ]
    results = results_with_conclusion(
        [trial(1, one_round(1000, 4), one_round(1000, 4)), *unmeasured], []
    )
    assert results.winner == 0
    assert sentence in results.why
    assert ("not measured" in results.why) == bool(sentence)
    if sentence:
        option = "--time-limit" if OUT_OF_TIME in reasons else "--exhaustive"
        assert f"{option} measures more" in results.why


def test_disturbed_rows_are_compared_by_their_processor_time() -> None:
    results = results_with_conclusion(
        [trial(1, disturbed(one_round(100, 4), 0.0)), trial(2, disturbed(one_round(90, 4), 1.0))],
        [],
    )
    assert results.winner == 1
    assert results.why.startswith("Recommended: cpu, 2 workers, batch 1")
    assert "for the processor time that it got: 90 requests/s" in results.why


def test_a_winner_of_paired_rounds_is_not_called_the_highest_in_the_table() -> None:
    lucky = trial(4, one_round(130, 20), one_round(98, 20), one_round(98, 20))
    slower = PairedComparison(first=0, second=1, ratio=0.98, low=0.97, high=0.99, real=True)
    results = results_with_conclusion(
        [lucky, trial(2, one_round(100, 20), one_round(100, 20))], [slower]
    )
    assert results.winner == 1
    assert results.why.startswith("Recommended: cpu, 2 workers, batch 1")
    assert ": 100 requests/s" in results.why
    assert heading(results) == "Recommended within p99<50ms"
