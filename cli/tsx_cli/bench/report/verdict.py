"""The conclusion of a run, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.bench.load.results import OUT_OF_TIME, OUTDONE, Point, Results, Trial
from tsx_cli.bench.search.points import failures
from tsx_cli.common.output import milliseconds, rounded

MAX_NAMED_TIES = 2  # further configurations that are tied with the winner are only counted


def conclude(results: Results) -> None:
    """Set `why` of the results."""
    if results.faster_unmeasured:
        results.why = _too_short_text(results)
    else:
        results.why = (
            _no_winner_text(results)
            if results.winner is None
            else _winner_text(results, results.winner)
        ) + _unmeasured_text(results)


def _too_short_text(results: Results) -> str:
    count = results.faster_unmeasured
    count_text = f"{count} configurations that are" if count > 1 else "a configuration that is"
    unmeasured = [
        (predicted_figures, trial)
        for trial in results.trials
        if trial.reason == OUT_OF_TIME and (predicted_figures := trial.predicted) is not None
    ]
    predicted, fastest = max(
        unmeasured, key=lambda candidate: candidate[0].throughput, default=(None, None)
    )
    example = (
        f", such as {fastest.as_configuration()} with about"
        f" {rounded(predicted.throughput)} requests/s"
        if fastest and predicted
        else ""
    )
    sentences = [
        f"The time was too short to choose: {count_text} expected to be faster could not be"
        f" measured{example}."
    ]
    measured = [(trial, point) for trial in results.trials if (point := trial.chosen) is not None]
    if measured:
        trial, point = max(measured, key=lambda measurement: measurement[1].throughput.value)
        figures = (
            f"{rounded(point.throughput.value)} requests/s with {point.offered}, {_tail(point)}"
        )
        sentences.append(f"The fastest that was measured is {trial.as_configuration()}: {figures}.")
    return " ".join(
        [
            *sentences,
            "Continue with --resume and a longer --time-limit, or give fewer configurations.",
        ]
    )


def _winner_text(results: Results, winner: int) -> str:
    trial = results.trials[winner]
    point = trial.chosen
    assert point is not None
    bound = f", within {results.slo}" if results.slo else ""
    figures = f"{rounded(point.throughput.value)} requests/s with {point.offered}, {_tail(point)}"
    condition = (
        " for the processor time that it got"
        if any(round_.disturbed for round_ in point.counted)
        else ""
    )
    sentences = [
        f"{trial.as_configuration()} has the highest measured throughput{bound}{condition}:"
        f" {figures}."
    ]
    if not results.winner_leads:
        sentences = [f"Recommended: {trial.as_configuration()}{bound}{condition}: {figures}."]
    if results.tied:
        tied_names = " and ".join(
            str(results.trials[position].as_configuration())
            for position in results.tied[:MAX_NAMED_TIES]
        )
        others_text = (
            f" and {len(results.tied) - MAX_NAMED_TIES} more"
            if len(results.tied) > MAX_NAMED_TIES
            else ""
        )
        tie_text = (
            f"A tie of {trial.as_configuration()} and {tied_names}{others_text}{bound}: the difference is"
            " within the noise."
        )
        sentences = [
            f"{tie_text} Recommended: {trial.as_configuration()}"
            f"{_recommendation_reason(results, winner)}: {figures}."
        ]
    elif len(results.trials) > 1 and len(point.counted) < 2:
        sentences.append(
            "It was measured once, as the time ended: --resume with a longer --time-limit compares"
            " it with others."
        )
    if winner == results.baseline and not results.tied and results.winner_leads:
        sentences.append(
            "That is the baseline, one worker and one request at a time: no other measured"
            " configuration has a higher throughput."
        )
    for pair in results.paired:
        configuration = results.trials[pair.second].as_configuration()
        name = (
            "the baseline, one worker and one request at a time"
            if pair.second == results.baseline
            else str(configuration)
        )
        if pair.real:
            sentences.append(f"{pair.ratio:.2f} times {name} ({pair.low:.2f} to {pair.high:.2f}).")
        else:
            sentences.append(
                f"Not significantly different: {name} ({pair.low:.2f} to {_times(pair.high)}"
                " times)."
            )
    if point.offered.mode == "closed":
        sentences += _open_loop_text(
            results,
            point,
            [open_point for open_point in trial.points if open_point.offered.mode == "open"],
        )
    return " ".join(sentences)


def _unmeasured_text(results: Results) -> str:
    """Describe how many configurations may be faster, and which option measures them."""
    chosen = None if results.winner is None else results.trials[results.winner].chosen
    reasons = [
        trial.reason
        for trial in results.trials
        if trial.reason == OUT_OF_TIME
        or (
            (trial.reason or "").endswith(OUTDONE)
            and chosen is not None
            and trial.predicted is not None
            and trial.predicted.throughput > chosen.throughput.value
        )
    ]
    if not reasons:
        return ""
    count_text = (
        "configurations that may be faster were"
        if len(reasons) > 1
        else "configuration that may be faster was"
    )
    option = "--resume with a longer --time-limit" if OUT_OF_TIME in reasons else "--exhaustive"
    return f" {len(reasons)} {count_text} predicted but not measured: {option} measures more."


def _recommendation_reason(results: Results, winner: int) -> str:
    """Return why the winner is preferred to its ties, if a figure of the table shows it."""
    recommended = results.trials[winner]
    tied_trials = [results.trials[position] for position in results.tied]
    if all(
        recommended.as_configuration().workers < trial.as_configuration().workers
        for trial in tied_trials
    ):
        return ", as it has the fewest workers"
    p99 = [
        point.latency.p99_ms
        for trial in [recommended, *tied_trials]
        if (point := trial.chosen) is not None
    ]
    if p99[0] == min(p99):
        return ", as it has the lowest p99"
    return ", as it has the highest measured throughput" if results.winner_leads else ""


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else "any number of"


def _open_loop_text(results: Results, chosen: Point, points: Sequence[Point]) -> list[str]:
    """Describe the winner under random arrivals, which a closed loop does not show."""
    highest_kept = max((point for point in points if point.holds), key=_rate, default=None)
    lowest_broken = min(
        (
            point
            for point in points
            if not point.holds and (highest_kept is None or _rate(point) > _rate(highest_kept))
        ),
        key=_rate,
        default=None,
    )
    if lowest_broken is None:
        return (
            []
            if highest_kept is None
            else [
                f"With {rounded(_rate(highest_kept))} requests/s that arrive at random:"
                f" {_tail(highest_kept)}."
            ]
        )
    failure_text = (
        f"{'breaks the bounds' if results.slo else 'does not keep up'} ({_tail(lowest_broken)})"
    )
    if highest_kept is not None:
        sustained = f"{rounded(_rate(highest_kept))}/s ({_tail(highest_kept)})"
        return [
            f"With requests that arrive at random it sustains {sustained}; with"
            f" {rounded(_rate(lowest_broken))} it {failure_text}."
        ]
    explanation = f"the bound holds for {chosen.offered}, asking again only once answered"
    return [
        f"With {rounded(_rate(lowest_broken))} requests/s that arrive at random it {failure_text}:"
        f" {explanation}."
    ]


def _rate(point: Point) -> float:
    return point.offered.rate or 0.0


def _no_winner_text(results: Results) -> str:
    measured = [(trial, point) for trial in results.trials for point in trial.points]
    if not measured:
        failed = next((trial.reason for trial in results.trials if trial.state == "failed"), None)
        return f"Nothing was measured: {failed}" if failed else "Nothing was measured."
    trial, point = min(
        measured,
        key=lambda measurement: (measurement[1].error_rate > 0, measurement[1].latency.p99_ms),
    )
    if point.error_rate:
        return f"No configuration answered all requests: {_errors(trial, point)}"
    bound = (
        f"No configuration holds {results.slo}" if results.slo else "No configuration can be chosen"
    )
    quickest = f"{trial.as_configuration()} with {point.offered}, {_tail(point)}"
    return f"{bound}: the quickest was {quickest}."


def _errors(trial: Trial, point: Point) -> str:
    errors = ", ".join(f"{count} x {kind}" for kind, count in failures(point.rounds).items())
    load = f"{trial.as_configuration()} with {point.offered}"
    return f"{load} failed {point.error_rate:.1%} of them ({errors})."


def _tail(point: Point) -> str:
    return f"p99 {milliseconds(point.p99_ms.value)}"
