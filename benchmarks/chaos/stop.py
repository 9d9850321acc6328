"""SIGTERM under load: every accepted request is answered, and none is refused."""

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

# A request that has waited this many seconds for an answer at the stop was certainly accepted.
MIN_ACCEPTED_S = 1.0
_numbers = itertools.count(1)


@dataclass
class Outcomes:
    """The outcomes of requests, by their numbers."""

    answered: dict[int, int] = field(default_factory=dict)  # statuses
    unanswered: dict[int, float] = field(default_factory=dict)  # sending times
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    sent: Counter[str] = field(default_factory=Counter)  # counts for each model


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


async def _stop(server: Server, scale: Scale, ran: Path, report: Report) -> None:
    seen = Outcomes()
    enough = 20 * scale.clients
    asking = [
        asyncio.create_task(_ask(server, model, ran, seen, enough))
        for model in (VICTIM, BYSTANDER)
        for _ in range(scale.clients)
    ]
    try:
        await asyncio.wait_for(seen.enough.wait(), MAX_WAIT_S)
        stopped_at = time.monotonic()
        code = await server.stop()
        report.complete = max(report.complete, time.monotonic() - stopped_at)
        await asyncio.wait_for(asyncio.gather(*asking), MAX_WAIT_S)
    finally:
        for task in asking:
            task.cancel()
    for model, count in seen.sent.items():
        report.sent[model] += count
    report.problems += _problems(seen, _numbers_in(ran), stopped_at)
    log = server.log.read_text(errors="replace")
    report.problems += [
        f"the log says: {line[:300]}"
        for line in log.splitlines()
        if any(text in line for text in UNEXPECTED)
    ][:5]
    if code != 0:
        report.problems.append(f"the server ended with exit code {code}")
    if survivors := await server.left_over():
        report.problems.append(f"processes outlived the server: {survivors}")


def _problems(seen: Outcomes, ran: set[int], stopped_at: float) -> list[str]:
    problems = []
    if refused := {number: status for number, status in seen.answered.items() if status != 200}:
        problems.append(
            f"{len(refused)} requests were refused after they were accepted:"
            f" {Counter(refused.values())}"
        )
    if lost := ran - set(seen.answered):
        problems.append(f"{len(lost)} requests ran and were not answered")
    if lost := {
        number for number, sent in seen.unanswered.items() if sent < stopped_at - MIN_ACCEPTED_S
    }:
        problems.append(f"{len(lost)} requests were sent long before the stop and not answered")
    if not ran:
        problems.append("no handler noted what it ran")
    return problems


def _numbers_in(file: Path) -> set[int]:
    return {int(line) for line in file.read_text().split()}


async def _ask(server: Server, model: str, ran: Path, seen: Outcomes, enough: int) -> None:
    """Send requests one after the other until no connection is accepted any more.

    A closed connection is replaced by another.
    """
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports["inference"])
        except OSError:
            return
        try:
            stays = True
            while stays:
                number = next(_numbers)
                body = f"{number} note {ran} {number}".encode()
                seen.sent[model] += 1
                seen.unanswered[number] = time.monotonic()
                head = (
                    f"POST /predictions/{model} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length:"
                    f" {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer, stays = await read_answer(reader)
                del seen.unanswered[number]
                seen.answered[number] = answer.status
                if len(seen.answered) >= enough:
                    seen.enough.set()
        except (OSError, EOFError):
            # The request of a closed connection stays among the unanswered.
            pass
        finally:
            writer.transport.abort()


SCENARIOS = (
    Scenario("the server is told to stop", settings={"drain_timeout": 30}, instead=stop_under_load),
    Scenario(
        "the server is told to stop, and goes on for a second",
        settings={"shutdown_delay": 1},
        instead=stop_under_load,
    ),
)
