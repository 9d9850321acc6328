"""A trial: two models under load, a fault of one of them, and checks during and after it."""

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
# texts that must not appear in the log
UNEXPECTED = (
    "failed unexpectedly",
    "supervision failed",
    "exception was never retrieved",
    "Exception in callback",
)


@dataclass(frozen=True)
class Scale:
    """The size of a trial."""

    clients: int  # clients of each model
    interval: float  # seconds between the requests of a client
    rounds: int  # repetitions of the fault
    slow_clients: int
    megabytes: int  # the size of floods and of unread answers
    # Whether workers are forked from a process with torch. That is the default, but starts later.
    preload: bool


SHORT = Scale(clients=4, interval=0.05, rounds=1, slow_clients=500, megabytes=24, preload=False)
LONG = Scale(clients=16, interval=0.02, rounds=5, slow_clients=10_000, megabytes=256, preload=True)


async def nothing(trial: Trial) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Scenario:
    """A fault; `allowed` has the statuses other than 200 that the victim's clients may get."""

    name: str
    fault: Callable[[Trial], Awaitable[None]] = nothing
    allowed: frozenset[int] = frozenset()
    victim: Mapping[str, object] = field(default_factory=dict)  # settings of its model-config.yaml
    settings: Mapping[str, object] = field(default_factory=dict)
    # makes a file descriptor for stdout and stderr of the server
    output: Callable[[ExitStack], int] | None = None
    # whether the fault would disturb the next trial on the same server
    needs_own_server: bool = False
    # A function that replaces the usual trial, for a fault that ends the server.
    custom_trial: Callable[[Scenario, Scale, Path], Awaitable[Report]] | None = None
    # returns why this machine cannot run the scenario
    unavailable_reason: Callable[[], str | None] = lambda: None


@dataclass
class Report:
    scenario: str
    sent: dict[str, int]
    errors: dict[int, int]  # statuses of the victim's clients
    # The longest time in seconds from a fault's end to the victim's next good answer.
    recovery: float
    complete: float  # seconds until all of the victim's workers were ready again
    problems: list[str]


class Trial:
    """The tools of a fault: a server, the load on it, and commands for the victim's handler."""

    def __init__(
        self, server: Server, scale: Scale, directory: Path, earlier_counts: Mapping[str, Counted]
    ) -> None:
        """Prepare a trial; `before` has the server's counts before it."""
        self.server = server
        self.before = earlier_counts
        self.scale = scale
        self.directory = directory
        self.tallies = {VICTIM: Tally(), BYSTANDER: Tally()}
        self.problems: list[str] = []
        self.round = 0
        self.recovery = self.complete = 0.0
        # requests of clients that left on purpose; the server may have counted them
        self.unanswered = 0

    def client(self, model: str = VICTIM) -> Client:
        return Client(self.server.ports["inference"], model, self.tallies[model])

    async def command(self, command: str, expected: int = 200) -> Answer:
        """Send a command to the victim's handler, whose answer must have the expected status."""
        client = self.client()
        answer = await client.ask(command)
        await client.close()
        if answer is None:
            raise RuntimeError(f"'{command}' was not answered")
        self.check(
            answer.status == expected,
            f"'{command}' was answered {answer.status}, not {expected}: {answer.body[:300].decode()}",
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
        """Wait until `holds` returns true, by polling with growing pauses."""
        end, pause = time.monotonic() + MAX_WAIT_S, 0.02
        while not await holds():
            if time.monotonic() > end:
                raise TimeoutError(f"it did not come to this: {state}")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    async def all_ready(self, model: str = VICTIM) -> None:
        async def ready() -> bool:
            description = (await self.server.manage("GET", f"/models/{model}"))[0]
            ready_workers = [
                worker for worker in description["workers"] if worker["status"] == "READY"
            ]
            return (
                len(ready_workers) == len(description["workers"]) >= int(description["minWorkers"])
            )

        await self.eventually(f"all workers of {model} are ready", ready)


async def run(scenario: Scenario, scale: Scale, directory: Path) -> Report:
    """Run a trial, and leave no process behind."""
    return (await run_in_turn([scenario], scale, directory))[0]


async def run_in_turn(scenarios: Sequence[Scenario], scale: Scale, directory: Path) -> list[Report]:
    """Run trials one after the other on the same server, until one finds a problem."""
    if scenarios[0].custom_trial is not None:
        return [await scenarios[0].custom_trial(scenarios[0], scale, directory)]
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
                    # The log tells what is wrong with the server.
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
    """Compare the counts: each request has exactly one answer, and errors are allowed ones."""
    for model, tally in trial.tallies.items():
        trial.check(
            tally.sent == tally.answered + trial.unanswered * (model == VICTIM),
            f"{model}: {tally.sent} sent, {tally.answered} answered",
        )
        trial.problems += [f"{model}: {problem}" for problem in [*tally.lost, *tally.wrong][:5]]
        allowed = scenario.allowed if model == VICTIM else frozenset()
        trial.check(not set(tally.errors) - allowed, f"{model}: clients saw {tally.errors}")
        counts = await _counted(trial, model)
        server_counts = dict(sorted(counts.statuses.items()))
        client_counts = dict(sorted(tally.statuses.items()))
        if model == VICTIM and trial.unanswered:
            unseen_answers = sum(server_counts.values()) - sum(client_counts.values())
            trial.check(
                0 <= unseen_answers <= trial.unanswered,
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
    """Return the server's counts, once it has answered or refused all accepted requests.

    Some of these belong to clients that left without waiting.
    """

    async def is_settled() -> bool:
        counts = await trial.server.counted(model)
        return counts.accepted <= sum(counts.statuses.values())

    await trial.eventually(f"all that {model} accepted is answered", is_settled)
    counts, earlier_counts = await trial.server.counted(model), trial.before[model]
    return Counted(
        counts.accepted - earlier_counts.accepted, counts.statuses - earlier_counts.statuses
    )


async def _look_back(trial: Trial) -> None:
    """Check that there are no zombies now, and no processes after the server's end."""
    trial.check(not (zombies := trial.server.zombies()), f"zombies: {zombies}")
    missing_pids = {*await trial.server.pids(VICTIM)} - {
        process.pid for process in trial.server.processes()
    }
    trial.check(
        not missing_pids, f"these workers could not be found after the server's end: {missing_pids}"
    )
    code = await trial.server.stop()
    trial.check(code == 0, f"the server ended with exit code {code}")
    trial.check(
        not (survivors := await trial.server.surviving_processes()),
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
    """Make an archive with the `torch-model-archiver` command."""
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
