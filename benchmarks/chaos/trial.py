"""A trial: two models under load, a fault of one of them, and the checks during it and after."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tsx_archiver.torch_model_archiver import main as pack_archive

from . import server as servers
from .load import MAX_WAIT_S, Answer, Client, Load, Tally
from .server import Counted, Server

HANDLER = Path(__file__).with_name("handler.py")
VICTIM, BYSTANDER = "victim", "bystander"
# Texts that must not be in the log.
UNEXPECTED = (
    "failed unexpectedly",
    "supervision failed",
    "exception was never retrieved",
    "Exception in callback",
)


@dataclass(frozen=True)
class Scale:
    """The weight of a trial."""

    clients: int  # clients of each model
    interval: float  # seconds between two requests of one client
    rounds: int  # repetitions of the fault
    slow_clients: int
    megabytes: int  # size of floods and of unread answers
    # Whether workers come from a process with torch, the default; a server starts later with it.
    preload: bool


SHORT = Scale(clients=4, interval=0.05, rounds=1, slow_clients=500, megabytes=24, preload=False)
LONG = Scale(clients=16, interval=0.02, rounds=5, slow_clients=10_000, megabytes=256, preload=True)


async def nothing(trial: Trial) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Scenario:
    """A fault; `allowed` are the statuses besides 200 that the victim's clients may get."""

    name: str
    fault: Callable[[Trial], Awaitable[None]] = nothing
    allowed: frozenset[int] = frozenset()
    victim: Mapping[str, object] = field(default_factory=dict)  # model-config.yaml
    settings: Mapping[str, object] = field(default_factory=dict)
    # A file descriptor for stdout and stderr of the server.
    output: Callable[[ExitStack], int] | None = None
    # Whether its remains would disturb the next trial on the same server.
    own_server: bool = False
    # A replacement of the usual trial, which the server would not survive.
    instead: Callable[[Scenario, Scale, Path], Awaitable[Report]] | None = None
    why_not: Callable[[], str | None] = lambda: None  # the reason why this machine cannot run it


@dataclass
class Report:
    scenario: str
    sent: dict[str, int]
    errors: dict[int, int]  # statuses of the victim's clients
    # Seconds from the fault's end to the victim's next good answer, the longest of all rounds.
    recovery: float
    complete: float  # seconds until all its workers were ready again
    problems: list[str]


class Trial:
    """The tools of a fault: a server, the load on it, and ways to do harm."""

    def __init__(
        self, server: Server, scale: Scale, directory: Path, before: Mapping[str, Counted]
    ) -> None:
        """Run a trial; `before` are the server's counts until now."""
        self.server = server
        self.before = before
        self.scale = scale
        self.directory = directory
        self.tallies = {VICTIM: Tally(), BYSTANDER: Tally()}
        self.problems: list[str] = []
        self.round = 0
        self.recovery = self.complete = 0.0
        # Requests of clients that left on purpose, which the server may have counted.
        self.unanswered = 0

    def client(self, model: str = VICTIM) -> Client:
        return Client(self.server.ports["inference"], model, self.tallies[model])

    async def order(self, order: str, expected: int = 200) -> Answer:
        """Order something from the victim's handler, whose answer must have this status."""
        client = self.client()
        answer = await client.ask(order)
        await client.close()
        if answer is None:
            raise RuntimeError(f"'{order}' was not answered")
        self.check(
            answer.status == expected,
            f"'{order}' was answered {answer.status}, not {expected}: {answer.body[:300].decode()}",
        )
        return answer

    def report(self, scenario: Scenario) -> Report:
        sent = {name: tally.sent for name, tally in self.tallies.items()}
        return Report(
            scenario.name,
            sent,
            self.tallies[VICTIM].errors,
            self.recovery,
            self.complete,
            self.problems,
        )

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    async def eventually(self, state: str, holds: Callable[[], Awaitable[bool]]) -> None:
        """Poll a state of the server, with growing pauses, until it holds."""
        end, pause = time.monotonic() + MAX_WAIT_S, 0.02
        while not await holds():
            if time.monotonic() > end:
                raise TimeoutError(f"it did not come to this: {state}")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    async def all_ready(self, model: str = VICTIM) -> None:
        async def ready() -> bool:
            described = (await self.server.manage("GET", f"/models/{model}"))[0]
            up = [worker for worker in described["workers"] if worker["status"] == "READY"]
            return len(up) == len(described["workers"]) >= int(described["minWorkers"])

        await self.eventually(f"all workers of {model} are ready", ready)


async def run(scenario: Scenario, scale: Scale, directory: Path) -> Report:
    """Run a trial, and leave no process behind."""
    return (await run_in_turn([scenario], scale, directory))[0]


async def run_in_turn(scenarios: Sequence[Scenario], scale: Scale, directory: Path) -> list[Report]:
    """Run trials of one kind of server, on one server, until one finds a problem."""
    if scenarios[0].instead is not None:
        return [await scenarios[0].instead(scenarios[0], scale, directory)]
    reports = []
    with ExitStack() as stack:
        output = None if scenarios[0].output is None else scenarios[0].output(stack)
        server = await start(scenarios[0], scale, directory, output)
        try:
            for scenario in scenarios:
                trial = Trial(
                    server,
                    scale,
                    directory,
                    {model: await server.counted(model) for model in (VICTIM, BYSTANDER)},
                )
                try:
                    await _under_load(trial, scenario)
                    await _compare(trial, scenario)
                    if scenario is scenarios[-1]:
                        await _look_back(trial)
                except (
                    OSError,
                    EOFError,
                    RuntimeError,
                    TimeoutError,
                    asyncio.TimeoutError,
                ) as error:
                    # The server is ill.
                    log = server.log.read_text(errors="replace")
                    trial.problems.append(
                        f"{type(error).__name__}: {error}; the log ends with {log[-1000:]}"
                    )
                reports.append(trial.report(scenario))
                if trial.problems:
                    break
        finally:
            await server.kill()
    return reports


async def start(
    scenario: Scenario, scale: Scale, directory: Path, output: int | None = None
) -> Server:
    settings = {
        "worker_preload": str(scale.preload).lower(),
        "default_startup_timeout": 60,
        **scenario.settings,
    }
    victim = pack(
        directory,
        VICTIM,
        json.dumps({"minWorkers": 2, "maxWorkers": 2, "batchSize": 8, **scenario.victim}),
    )
    bystander = pack(
        directory, BYSTANDER, json.dumps({"minWorkers": 1, "maxWorkers": 1, "batchSize": 8})
    )
    return await servers.start(directory, [victim, bystander], settings, output=output)


async def _under_load(trial: Trial, scenario: Scenario) -> None:
    scale = trial.scale
    load = Load(
        [trial.client(model) for model in trial.tallies for _ in range(scale.clients)],
        scale.interval,
    )
    try:
        await load.during(_rounds(trial, scenario))
    finally:
        await load.stop()


async def _rounds(trial: Trial, scenario: Scenario) -> None:
    count = 3 * trial.scale.clients
    for number in range(trial.scale.rounds):
        trial.round = number
        await asyncio.gather(*(tally.good(count) for tally in trial.tallies.values()))
        await scenario.fault(trial)
        fault_end = time.monotonic()
        trial.recovery = max(trial.recovery, await trial.tallies[VICTIM].good())
        await trial.all_ready()
        trial.complete = max(trial.complete, time.monotonic() - fault_end)
    await asyncio.gather(*(tally.good(count) for tally in trial.tallies.values()))


async def _compare(trial: Trial, scenario: Scenario) -> None:
    """Compare the counts: each request has exactly one answer, and only allowed errors."""
    for model, tally in trial.tallies.items():
        trial.check(
            tally.sent == tally.answered + trial.unanswered * (model == VICTIM),
            f"{model}: {tally.sent} sent, {tally.answered} answered",
        )
        trial.problems += [f"{model}: {problem}" for problem in [*tally.lost, *tally.wrong][:5]]
        allowed = scenario.allowed if model == VICTIM else frozenset()
        trial.check(not set(tally.errors) - allowed, f"{model}: clients saw {tally.errors}")
        counted = await _counted(trial, model)
        server_counts = dict(sorted(counted.statuses.items()))
        client_counts = dict(sorted(tally.statuses.items()))
        if model == VICTIM and trial.unanswered:
            surplus = sum(server_counts.values()) - sum(client_counts.values())
            trial.check(
                0 <= surplus <= trial.unanswered,
                f"{model}: clients got {client_counts}, the server gave {server_counts}, and"
                f" {trial.unanswered} left",
            )
        else:
            trial.check(
                server_counts == client_counts,
                f"{model}: clients got {client_counts}, the server says that it gave"
                f" {server_counts}",
            )
    ping = await trial.server.call("GET", "/ping")
    trial.check(ping.status == 200, f"/ping says {ping.status} {ping.body.decode()}")


async def _counted(trial: Trial, model: str) -> Counted:
    """Return the server's counts, once it has answered or refused all that it accepted.

    Clients that left did not wait for it.
    """

    async def quiet() -> bool:
        counted = await trial.server.counted(model)
        return counted.accepted <= sum(counted.statuses.values())

    await trial.eventually(f"all that {model} accepted is answered", quiet)
    counted, before = await trial.server.counted(model), trial.before[model]
    return Counted(counted.accepted - before.accepted, counted.statuses - before.statuses)


async def _look_back(trial: Trial) -> None:
    """Check that nothing of the server is left, neither now nor after its end."""
    trial.check(not (zombies := trial.server.zombies()), f"zombies: {zombies}")
    missing = {*await trial.server.pids(VICTIM)} - {
        process.pid for process in trial.server.processes()
    }
    trial.check(not missing, f"these workers could not be found after the server's end: {missing}")
    code = await trial.server.stop()
    trial.check(code == 0, f"the server ended with exit code {code}")
    trial.check(
        not (survivors := await trial.server.left_over()),
        f"processes outlived the server: {survivors}",
    )
    log = trial.server.log.read_text(errors="replace")
    trial.problems += [
        f"the log says: {line[:300]}"
        for line in log.splitlines()
        if any(text in line for text in UNEXPECTED)
    ][:5]


def pack(
    directory: Path, name: str, config: str, version: str = "1.0", handler: Path = HANDLER
) -> Path:
    """Make an archive with the `torch-model-archiver` command of all scripts."""
    (directory / "model-config.yaml").write_text(config)  # JSON is valid YAML.
    arguments = [
        "--model-name",
        name,
        "--version",
        version,
        "--handler",
        handler,
        "--config-file",
        directory / "model-config.yaml",
    ]
    pack_archive([*map(str, arguments), "--export-path", str(directory), "--force"])
    return directory / f"{name}.mar"
