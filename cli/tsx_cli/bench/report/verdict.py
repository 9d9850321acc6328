"""The conclusion of a run, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.bench.load.results import OUT_OF_TIME, OUTDONE, Point, Results, Trial
from tsx_cli.bench.search.points import failures
from tsx_cli.common.output import milliseconds, rounded

NAMED = 2  # of the configurations that are tied with the winner


def conclude(results: Results) -> None:
    """Fill in `why`."""
    if results.faster_unmeasured:
        results.why = _too_short(results)
    else:
        results.why = (
            _nobody(results) if results.winner is None else _winner(results, results.winner)
        ) + _unmeasured(results)


def _too_short(results: Results) -> str:
    count = results.faster_unmeasured
    several = f"{count} configurations that are" if count > 1 else "a configuration that is"
    left = [
        (one, trial)
        for trial in results.trials
        if trial.reason == OUT_OF_TIME and (one := trial.predicted) is not None
    ]
    predicted, fastest = max(left, key=lambda each: each[0].throughput, default=(None, None))
    such = (
        f", such as {fastest.how()} with about {rounded(predicted.throughput)} requests/s"
        if fastest and predicted
        else ""
    )
    sentences = [
        f"The time was too short to choose: {several} expected to be faster could not be"
        f" measured{such}."
    ]
    measured = [(trial, point) for trial in results.trials if (point := trial.chosen) is not None]
    if measured:
        trial, point = max(measured, key=lambda each: each[1].throughput.value)
        figures = (
            f"{rounded(point.throughput.value)} requests/s with {point.offered}, {_tail(point)}"
        )
        sentences.append(f"The fastest that was measured is {trial.how()}: {figures}.")
    return " ".join(
        [
            *sentences,
            "Continue with --resume and a longer --time-limit, or give fewer configurations.",
        ]
    )


def _winner(results: Results, winner: int) -> str:
    trial = results.trials[winner]
    point = trial.chosen
    assert point is not None
    bound = f", within {results.slo}" if results.slo else ""
    figures = f"{rounded(point.throughput.value)} requests/s with {point.offered}, {_tail(point)}"
    got = (
        " for the processor time that it got"
        if any(each.disturbed for each in point.counted)
        else ""
    )
    sentences = [f"{trial.how()} has the highest measured throughput{bound}{got}: {figures}."]
    if not results.winner_leads:
        sentences = [f"Recommended: {trial.how()}{bound}{got}: {figures}."]
    if results.tied:
        others = " and ".join(str(results.trials[each].how()) for each in results.tied[:NAMED])
        more = f" and {len(results.tied) - NAMED} more" if len(results.tied) > NAMED else ""
        tie = (
            f"A tie of {trial.how()} and {others}{more}{bound}: the difference is within the noise."
        )
        sentences = [f"{tie} Recommended: {trial.how()}{_reason(results, winner)}: {figures}."]
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
        other = results.trials[pair.second].how()
        name = (
            "the baseline, one worker and one request at a time"
            if pair.second == results.baseline
            else str(other)
        )
        if pair.real:
            sentences.append(f"{pair.ratio:.2f} times {name} ({pair.low:.2f} to {pair.high:.2f}).")
        else:
            sentences.append(
                f"Not significantly different: {name} ({pair.low:.2f} to {_times(pair.high)}"
                " times)."
            )
    if point.offered.mode == "closed":
        sentences += _at_random(
            results, point, [each for each in trial.points if each.offered.mode == "open"]
        )
    return " ".join(sentences)


def _unmeasured(results: Results) -> str:
    """Say how many configurations may be faster, and which option measures them."""
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
    several = (
        "configurations that may be faster were"
        if len(reasons) > 1
        else "configuration that may be faster was"
    )
    option = "--resume with a longer --time-limit" if OUT_OF_TIME in reasons else "--exhaustive"
    return f" {len(reasons)} {several} predicted but not measured: {option} measures more."


def _reason(results: Results, winner: int) -> str:
    """Return why it is recommended before its ties, if a figure of the table says so."""
    one, tied = results.trials[winner], [results.trials[each] for each in results.tied]
    if all(one.how().workers < each.how().workers for each in tied):
        return ", as it has the fewest workers"
    p99 = [point.latency.p99_ms for each in [one, *tied] if (point := each.chosen) is not None]
    if p99[0] == min(p99):
        return ", as it has the lowest p99"
    return ", as it has the highest measured throughput" if results.winner_leads else ""


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else "any number of"


def _at_random(results: Results, chosen: Point, tried: Sequence[Point]) -> list[str]:
    """What the winner does where clients do not wait for answers before they ask again, which no
    closed loop tells.
    """
    most = max((each for each in tried if each.holds), key=_rate, default=None)
    least = min(
        (each for each in tried if not each.holds and (most is None or _rate(each) > _rate(most))),
        key=_rate,
        default=None,
    )
    if least is None:
        return (
            []
            if most is None
            else [f"With {rounded(_rate(most))} requests/s that arrive at random: {_tail(most)}."]
        )
    fails = f"{'breaks the bounds' if results.slo else 'does not keep up'} ({_tail(least)})"
    if most is not None:
        sustained = f"{rounded(_rate(most))}/s ({_tail(most)})"
        return [
            f"With requests that arrive at random it sustains {sustained}; with"
            f" {rounded(_rate(least))} it {fails}."
        ]
    waits = f"the bound holds for {chosen.offered}, asking again only once answered"
    return [f"With {rounded(_rate(least))} requests/s that arrive at random it {fails}: {waits}."]


def _rate(point: Point) -> float:
    return point.offered.rate or 0.0


def _nobody(results: Results) -> str:
    tried = [(trial, point) for trial in results.trials for point in trial.points]
    if not tried:
        failed = next((trial.reason for trial in results.trials if trial.state == "failed"), None)
        return f"Nothing was measured: {failed}" if failed else "Nothing was measured."
    trial, point = min(tried, key=lambda each: (each[1].error_rate > 0, each[1].latency.p99_ms))
    if point.error_rate:
        return f"No configuration answered all requests: {_errors(trial, point)}"
    bound = (
        f"No configuration holds {results.slo}" if results.slo else "No configuration can be chosen"
    )
    return f"{bound}: the quickest was {trial.how()} with {point.offered}, {_tail(point)}."


def _errors(trial: Trial, point: Point) -> str:
    errors = ", ".join(f"{count} x {kind}" for kind, count in failures(point.rounds).items())
    return f"{trial.how()} with {point.offered} failed {point.error_rate:.1%} of them ({errors})."


def _tail(point: Point) -> str:
    return f"p99 {milliseconds(point.p99_ms.value)}"
