"""`tsx bench --against` measures a load on a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.generator import LoadProgress, max_connections, measure
from tsx_cli.bench.load.payloads import mix
from tsx_cli.bench.load.plan import Arrivals, LoadPlan
from tsx_cli.bench.load.results import ModelInfo, PinnedCores, Point, Results, Round, Trial, now
from tsx_cli.bench.load.statistics import MIN_ROUNDS
from tsx_cli.bench.report import facts, show_details, shown
from tsx_cli.bench.report.tables import loads
from tsx_cli.bench.search.confirm import measure_knee
from tsx_cli.bench.search.machine import environment
from tsx_cli.bench.search.points import best_point, failures, knee_of, open_loops, with_round
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.output import milliseconds, one_line, print_table

OPEN_LOOP_CONNECTIONS = 256  # maximum number of concurrent requests in an open loop


def run_against(
    plan: LoadPlan,
    source: str,
    *,
    rounds: int = 1,
    slo: Slo | None = None,
    ramp: Arrivals | None = None,
    pinning: PinnedCores | None = None,
    price_per_hour: float | None = None,
    command: str = "",
    on_progress: Callable[[int, LoadProgress], None] | None = None,
) -> Results:
    """Measure `rounds` rounds of the load, or search for its knee.

    With `ramp`, one round is followed by open loops with such arrivals and rising rates, up to the
    knee. `on_progress` receives the index of the round and the progress.

    Raises:
        CliError: There is no server, or it accepted no request.
        UsageError: The options do not fit together.
    """
    if rounds < 1:
        raise UsageError(f"--rounds: {rounds} is too few; give 1 or more")
    start_time = now()
    points: list[Point] = []
    round_numbers = count()

    def measure_load(round_plan: LoadPlan) -> Point:
        round_number = next(round_numbers)
        report = None if on_progress is None else partial(on_progress, round_number)
        result = measure(
            replace(round_plan, seed=plan.seed + round_number, cores=cores), on_progress=report
        )
        if not points and not result.ok:
            raise CliError(_no_success_text(plan, result))
        if slo is not None and slo.of_streams and result.stream is None:
            advice = (
                "send requests that are streamed, such as --prompt-tokens 64, by --protocol"
                " openai-chat, openai-completions or tsx"
            )
            raise UsageError(
                f"--slo {slo.of_streams[0].text} is of event streams, and the answers are none:"
                f" {advice}"
            )
        return points[with_round(points, round_plan.offered, result, slo)]

    cores = () if pinning is None else tuple(pinning.generator)
    for _ in range(1 if ramp else rounds):
        measure_load(plan)
    ramp_notes: list[str] = []
    if ramp:
        connections = min(OPEN_LOOP_CONNECTIONS, max_connections())
        throughput = points[0].throughput.value
        if throughput <= 0:
            raise CliError(
                f"--ramp: no answer came within {plan.seconds:g} s, so no rate is known to start"
                " from; give a longer --duration"
            )

        def at_rate(rate: float) -> Point | None:
            try:
                return measure_load(
                    replace(plan, mode="open", arrivals=ramp, connections=connections, rate=rate)
                )
            except CliError as error:
                # A server that fails at a high rate is a result, not an error.
                ramp_notes.append(f"the ramp ended at {rate:g} requests/s: {error.message}")
                return None

        measure_knee(at_rate, throughput, max(rounds, MIN_ROUNDS))
    knee_point = knee_of(points).held if ramp else None
    best = best_point(points) if knee_point is None else points.index(knee_point)
    return Results(
        started=start_time,
        ended=now(),
        command=command,
        model=ModelInfo(name=plan.model, version=plan.version),
        against=plan.url,
        protocol=plan.protocol,
        slo=None if slo is None else str(slo),
        environment=environment(noise=False),
        inputs=mix(plan.payloads, source),
        price_per_hour=price_per_hour,
        pinning=pinning,
        trials=[Trial(configuration={}, points=points, best=best)],
        notes=[*_notes(points[best or 0]), *(_knee_notes(points) if ramp else ()), *ramp_notes],
    )


def show_against(results: Results) -> None:
    """Print the figures of the load, one per line, and the rates of a ramp."""
    trial = results.trials[0]
    point = trial.chosen or trial.points[0]
    table = loads([trial.model_copy(update={"points": [point]})], results)
    rows: dict[str, object] = dict(zip(table.head[1:], table.rows[0][1:], strict=True))
    if results.slo is not None:
        rows["bounds"] = f"{results.slo}: {'hold' if point.holds else 'do not hold'}"
    seconds, inputs = sum(round_.seconds for round_ in point.rounds), results.inputs
    sent_text = (
        f"{sum(round_.sent for round_ in point.rounds):,} in {seconds:.1f} s; {inputs.count}"
        f" different, {facts.size_range(inputs)}"
    )
    total = sum(round_.sent + round_.unsent for round_ in point.rounds) or 1
    rows |= {
        "sent": sent_text,
        **{
            kind: f"{count:,} ({count / total:.2%})"
            for kind, count in failures(point.rounds).items()
        },
    }
    if stalls := shown.stalls(point):
        rows["stalls"] = stalls
    busiest = max(
        point.rounds, key=lambda round_: round_.generator.cpu + round_.generator.starved
    ).generator
    lateness_text = (
        f"; {milliseconds(max(round_.generator.late_p99_ms for round_ in point.rounds))} late (p99)"
        if point.offered.mode == "open"
        else ""
    )
    rows["generator"] = (
        f"{busiest.cpu:.0%} of a core, {busiest.starved:.0%} of the time without one{lateness_text}"
    )
    if results.pinning is not None:
        rows["pinned to cores"] = facts.pinned(results)
    print_table(
        [
            (
                f"{results.model.name} at {results.against}"
                if results.model.name
                else f"{results.against}"
            ),
            "",
        ],
        rows.items(),
    )
    show_details(results)
    for line in _ramp_lines(results):
        print(line)
    for note in results.notes:
        print(f"note: {one_line(note)}")


def _ramp_lines(results: Results) -> Iterator[str]:
    """Yield a line for each rate, and one for the knee."""
    points = open_loops(results.trials[0].points)
    if len(points) < 2:
        return
    for point in points:
        p99 = shown.with_margin(point.p99_ms)
        yield (
            f"{shown.rate(point)}: p50 {milliseconds(point.latency.p50_ms)}, p99"
            f" {p99}{'' if point.holds else ', does not hold'}"
        )
    held, broken = knee_of(points)
    bounds = results.slo or "the throughput follows the rate"
    if held is None:
        yield f"no rate holds: {bounds}"
    else:
        limit_text = (
            "the load ended before one that does not"
            if broken is None
            else f"{shown.rate(broken)} does not"
        )
        yield f"knee: {shown.rate(held)} holds, {limit_text} ({bounds})"


def _notes(point: Point) -> list[str]:
    """Return warnings about the figures."""
    notes = []
    limit = next(
        (round_.generator.limited for round_ in point.rounds if round_.generator.limited), None
    )
    if limit:
        notes.append(f"these figures describe the load generator and not the server: {limit}")
    late_requests = sum(round_.generator.waited for round_ in point.rounds)
    sent = sum(round_.sent for round_ in point.rounds)
    if late_requests > 0.01 * sent:
        notes.append(
            f"{late_requests / sent:.0%} of the requests found no free connection when due, and"
            " their wait counts; give more --connections"
        )
    if any(round_.corrected_p99_ms for round_ in point.rounds):
        notes.append(
            "a closed loop sends less while the server stalls; --rate keeps sending, and its"
            " latencies show what clients see then"
        )
    return notes


def _knee_notes(points: Sequence[Point]) -> list[str]:
    broken = knee_of(points).broken
    limits = (
        [round_.generator.limited for round_ in broken.rounds if round_.generator.limited]
        if broken is not None
        else []
    )
    return (
        [f"the knee may be that of the load generator and not of the server: {limits[-1]}"]
        if limits
        else []
    )


def _no_success_text(plan: LoadPlan, result: Round) -> str:
    counts = failures([result]).items()
    outcome = (
        ", ".join(f"{kind} ({count:,} times)" for kind, count in counts) or "nothing came back"
    )
    return (
        f"{plan.url} accepted no request: {outcome}; is {plan.model!r} the name of a model there,"
        f" does this port speak --protocol {plan.protocol}, and does it need https or a --token?"
    )
