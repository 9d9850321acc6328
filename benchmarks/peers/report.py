"""The report of a comparison, as Markdown tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import machine, openloop
from benchmarks.peers.field import PEERS, SETTINGS_NOTES
from benchmarks.peers.measure import CONNECTIONS, WORKLOADS, Key, OpenKey, Results
from benchmarks.peers.verdict import Verdict, judge_all, ratio


def tables(results: Results) -> str:
    medians, lines = results.medians(), ["## Closed loop (wrk -t1)", ""]
    lines += [
        "| workload | connections | server | requests/s | p50 ms | p99 ms | front end us/request |"
        " tsx: times the requests/s |"
    ]
    lines += ["|---" * 8 + "|"]
    for workload in WORKLOADS:
        for connections in CONNECTIONS:
            ours = medians.get(Key(workload.name, "tsx", connections))
            for peer in PEERS:
                key = Key(workload.name, peer, connections)
                head = f"| {workload.name} | {connections} | {peer} | "
                if point := medians.get(key):
                    times = f"{ratio(ours, point, 'rate'):.2f}" if ours and peer != "tsx" else ""
                    lines.append(
                        f"{head}{point.rate:,.0f} | {point.p50:.2f} | {point.p99:.2f} |"
                        f" {point.cpu:.1f} | {times} |"
                    )
                elif key in results.failed:
                    lines.append(f"{head}failed: {results.failed[key]} | | | | |")
    for workload_name, rate in results.bare_medians().items():
        lines.append(
            f"| {workload_name} | | the handler alone, in a plain loop | {rate:,.0f} | | | | |"
        )
    return "\n".join([*lines, "", *open_table(results)])


def open_table(results: Results) -> list[str]:
    if not results.opened:
        return []
    lines = ["## Open loop: latency from the planned time", ""]
    lines += [
        "| workload | arrivals | % of capacity | server | planned/s | goodput/s | p50 ms | p99 ms |"
        " refused | errors | unsent | note |"
    ]
    lines += ["|---" * 12 + "|"]
    for key, rounds in sorted(results.opened.items(), key=lambda item: order(item[0])):
        medians_of_rounds = {
            name: machine.median([getattr(result, name) for result in rounds])
            for name in ("rate", "goodput", "p50", "p99")
        }
        share = {
            name: sum(count(result, name) for result in rounds)
            / sum(result.planned for result in rounds)
            for name in ("refused", "errors", "unsent")
        }
        limited = [result.limited for result in rounds if result.limited]
        note = f"says nothing of the server: {limited[0]}" if limited else ""
        cells = [
            *key[:1],
            key.arrivals,
            key.level,
            key.peer,
            f"{medians_of_rounds['rate']:,.0f}",
            f"{medians_of_rounds['goodput']:,.0f}",
        ]
        cells += [
            f"{medians_of_rounds['p50']:.2f}",
            f"{medians_of_rounds['p99']:.2f}",
            *(f"{value:.1%}" if value else "" for value in share.values()),
            note,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [*lines, ""]


def order(key: OpenKey) -> tuple[int, str, int, int]:
    names = [workload.name for workload in WORKLOADS]
    return names.index(key.workload), key.arrivals, key.level, PEERS.index(key.peer)


def count(result: openloop.Result, kind: str) -> int:
    if kind == "errors":
        return sum(result.errors.values()) + result.unanswered
    return result.refused if kind == "refused" else result.unsent


def promises(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "## Promises",
        "",
        "| promise | | worst ratio | at | points | short |",
        "|---" * 6 + "|",
    ]
    for verdict in verdicts:
        worst = "" if verdict.ratio is None else f"{verdict.ratio:.2f}"
        lines.append(
            f"| {verdict.promise} | {verdict.state} | {worst} | {verdict.where} |"
            f" {verdict.points} | {'; '.join(verdict.short)} |"
        )
    return "\n".join(lines)


def report_text(results: Results, head: str, noise: machine.Noise, disturbed: Sequence[str]) -> str:
    verdicts = judge_all(results.medians(), results.failed, results.bare_medians())
    lines = [head, "", tables(results), promises(verdicts), "", str(noise)]
    lines += [f"NOT QUIET: {disturbance}. Measure again." for disturbance in disturbed]
    lines += [f"left out: {name}: {reason}" for name, reason in results.left_out.items()]
    lines += [f"{name}: {note}" for name, note in SETTINGS_NOTES.items()]
    return "\n".join(lines)


def as_json(
    results: Results, head: str, noise: machine.Noise, disturbed: Sequence[str]
) -> dict[str, Any]:
    medians = results.medians()
    return {
        "head": head,
        "closed": [
            {
                **key._asdict(),
                "median": medians[key]._asdict() if key in medians else None,
                "rounds": [round_._asdict() for round_ in rounds],
            }
            for key, rounds in results.closed.items()
        ],
        "open": [
            {**key._asdict(), "rounds": [round_._asdict() for round_ in rounds]}
            for key, rounds in results.opened.items()
        ],
        "bare": results.bare,
        "failed": [{**key._asdict(), "why": reason} for key, reason in results.failed.items()],
        "left_out": results.left_out,
        "promises": [
            verdict._asdict()
            for verdict in judge_all(medians, results.failed, results.bare_medians())
        ],
        "noise": {"seconds": noise.samples, "loads": noise.loads, "disturbed": list(disturbed)},
    }
