"""The fault SIGTERM under load: every accepted request must be answered, and none refused."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .load import MAX_WAIT_S, read_answer
from .server import Server
from .trial import BYSTANDER, UNEXPECTED, VICTIM, Report, Scale, Scenario, start

# A request that was sent this many seconds before the stop was certainly accepted.
MIN_ACCEPTED_S = 1.0
_numbers = itertools.count(1)


@dataclass
class Outcomes:
    """The outcomes of requests, by request number."""

    answered: dict[int, int] = field(default_factory=dict)  # values: statuses
    unanswered: dict[int, float] = field(default_factory=dict)  # values: sending times
    has_enough: asyncio.Event = field(default_factory=asyncio.Event)
    sent: Counter[str] = field(default_factory=Counter)  # numbers by model


async def stop_under_load(scenario: Scenario, scale: Scale, directory: Path) -> Report:
    report = Report(scenario.name, {VICTIM: 0, BYSTANDER: 0}, {}, 0.0, 0.0, [])
    for number in range(scale.rounds):
        round_directory = directory / f"stop{number}"
        round_directory.mkdir()
        server = await start(scenario, scale, round_directory)
        try:
            await _stop(server, scale, round_directory / "ran", report)
        except (OSError, RuntimeError, TimeoutError, asyncio.TimeoutError) as error:
            report.problems.append(
                f"{type(error).__name__}: {error}; the log ends with"
                f" {server.log.read_text(errors='replace')[-1000:]}"
            )
        finally:
            await server.kill()
    return report


async def _stop(server: Server, scale: Scale, run_log: Path, report: Report) -> None:
    outcomes = Outcomes()
    min_answers = 20 * scale.clients
    client_tasks = [
        asyncio.create_task(_ask(server, model, run_log, outcomes, min_answers))
        for model in (VICTIM, BYSTANDER)
        for _ in range(scale.clients)
    ]
    try:
        await asyncio.wait_for(outcomes.has_enough.wait(), MAX_WAIT_S)
        stop_time = time.monotonic()
        code = await server.stop()
        report.complete = max(report.complete, time.monotonic() - stop_time)
        await asyncio.wait_for(asyncio.gather(*client_tasks), MAX_WAIT_S)
    finally:
        for task in client_tasks:
            task.cancel()
    for model, count in outcomes.sent.items():
        report.sent[model] += count
    report.problems += _problems(outcomes, _numbers_in(run_log), stop_time)
    log = server.log.read_text(errors="replace")
    report.problems += [
        f"the log says: {line[:300]}"
        for line in log.splitlines()
        if any(text in line for text in UNEXPECTED)
    ][:5]
    if code != 0:
        report.problems.append(f"the server ended with exit code {code}")
    if survivors := await server.surviving_processes():
        report.problems.append(f"processes outlived the server: {survivors}")


def _problems(outcomes: Outcomes, run_log: set[int], stop_time: float) -> list[str]:
    problems = []
    if refused_requests := {
        number: status for number, status in outcomes.answered.items() if status != 200
    }:
        problems.append(
            f"{len(refused_requests)} requests were refused after they were accepted:"
            f" {Counter(refused_requests.values())}"
        )
    if lost_requests := run_log - set(outcomes.answered):
        problems.append(f"{len(lost_requests)} requests ran and were not answered")
    if lost_requests := {
        number for number, sent in outcomes.unanswered.items() if sent < stop_time - MIN_ACCEPTED_S
    }:
        problems.append(
            f"{len(lost_requests)} requests were sent long before the stop and not answered"
        )
    if not run_log:
        problems.append("no handler noted what it ran")
    return problems


def _numbers_in(file: Path) -> set[int]:
    return {int(line) for line in file.read_text().split()}


async def _ask(
    server: Server, model: str, run_log: Path, outcomes: Outcomes, min_answers: int
) -> None:
    """Send requests one after the other, until the server accepts no more connections.

    If the server closes a connection, the next one is opened.
    """
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports["inference"])
        except OSError:
            return
        try:
            stays_open = True
            while stays_open:
                number = next(_numbers)
                body = f"{number} note {run_log} {number}".encode()
                outcomes.sent[model] += 1
                outcomes.unanswered[number] = time.monotonic()
                head = (
                    f"POST /predictions/{model} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length:"
                    f" {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer, stays_open = await read_answer(reader)
                del outcomes.unanswered[number]
                outcomes.answered[number] = answer.status
                if len(outcomes.answered) >= min_answers:
                    outcomes.has_enough.set()
        except (OSError, EOFError):
            # The request of a closed connection stays in `unanswered`.
            pass
        finally:
            writer.transport.abort()


SCENARIOS = (
    Scenario(
        "the server is told to stop", settings={"drain_timeout": 30}, custom_trial=stop_under_load
    ),
    Scenario(
        "the server is told to stop, and goes on for a second",
        settings={"shutdown_delay": 1},
        custom_trial=stop_under_load,
    ),
)
