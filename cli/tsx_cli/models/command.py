"""`tsx models` uses the management API of a running server."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from tsx_cli.common.client import AnswerCommand, RequestFailed, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson, ModelName
from tsx_cli.common.output import human, print_json, print_result, print_table, rounded
from tsx_cli.models import adapter, monitor, record, rollout, shadow, traffic
from tsx_runtime.shared.log_format import escaped
from tsx_runtime.shared.suggestions import suggestion

PAGE = 100
PROGRESS_S = 1.0  # interval between checks of starting workers
MANIFEST = "MAR-INF"
UNREADABLE = ("ModelNotFoundException", "DownloadArchiveException")
ALREADY_REGISTERED = "ConflictStatusException"
OUTSIDE_STORE = " does not match any allowed URL(s). "
WITHOUT_WORKERS = re.compile(
    r'(Model "(.+)" Version: (\S+) .+) Use scale workers API to add workers for the model\.'
)

Version = Annotated[
    str | None, typer.Option(help="Version of the model; by default its default version.")
]
ArchiveName = Annotated[
    str,
    typer.Argument(
        help="An archive in the server's model store, or one that the server was started with. For"
        " another one without downtime: `tsx serve OLD NEW --replace`."
    ),
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Return at once; the workers start in the background.")
]

app = typer.Typer(
    add_completion=False,
    help="List, describe, register, scale and remove the models of a running server.",
    no_args_is_help=True,
)


@app.command("list", cls=AnswerCommand)
@with_server
def list_models(server: Server, as_json: AsJson = False) -> None:
    """List all models with their versions."""
    names = [model["modelName"] for model in all_models(server)]
    versions = {name: server.call("GET", path("models", name, "all")).json(list) for name in names}
    if as_json:
        print_json([version for name in names for version in versions[name]])
        return
    if not names:
        print(
            f"no model is registered at {server.url}; add one of the model store with `tsx models"
            " register FILE`"
        )
        return
    defaults = {name: _default_version(server, name, versions[name]) for name in names}
    rows = [
        _row(version, version["modelVersion"] == defaults[name])
        for name in names
        for version in versions[name]
    ]
    print_table(
        ["model", "version", "default", "workers", "device", "batch size", "waiting", "archive"],
        rows,
    )


@app.command(cls=AnswerCommand)
@with_server
def describe(
    server: Server, name: ModelName, version: Version = None, as_json: AsJson = False
) -> None:
    """Show one model: its versions, their workers, and why a worker could not load."""
    answer = server.call("GET", path("models", name, version or "all")).json(list)
    if as_json:
        print_json(answer)
        return
    for version_record in answer:
        _print_version(version_record)


@app.command(cls=AnswerCommand)
@with_server
def register(
    server: Server,
    archive: ArchiveName,
    name: Annotated[
        str | None, typer.Option(help="Name to serve it under; by default the archive's.")
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="Handler to use in place of the archive's.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Workers to start, if the archive has no minWorkers.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of requests in a batch.")
    ] = None,
    max_batch_delay: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum milliseconds that a request waits for its batch."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Latency target, such as p99<50ms, in place of a batch size.")
    ] = None,
    response_timeout: Annotated[
        int | None, typer.Option(min=1, help="Seconds a worker may take for a batch.")
    ] = None,
    startup_timeout: Annotated[
        int | None, typer.Option(min=1, help="Seconds a worker may take to load the model.")
    ] = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Register an archive and start the workers that the archive or --workers asks for."""
    _register(
        server,
        archive,
        as_json,
        model_name=name,
        handler=handler,
        initial_workers=workers,
        batch_size=batch_size,
        max_batch_delay=max_batch_delay,
        slo=slo,
        response_timeout=response_timeout,
        startup_timeout=startup_timeout,
        synchronous=not no_wait,
    )


@app.command(cls=AnswerCommand)
@with_server
def replace(
    server: Server,
    archive: ArchiveName,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default the archive's.")
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="Handler to use in place of the archive's.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Workers to start; by default as many as now.")
    ] = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Replace a version of a model without losing a request.

    That is the version with the archive's version number, or the default version.
    """
    _register(
        server,
        archive,
        as_json,
        model_name=name,
        handler=handler,
        initial_workers=workers,
        replace=True,
        synchronous=not no_wait,
    )


@app.command(cls=AnswerCommand)
@with_server
def scale(
    server: Server,
    name: ModelName,
    count: Annotated[
        int | None, typer.Argument(metavar="[WORKERS]", min=0, help="Number of workers.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="The same as an option.")
    ] = None,
    minimum: Annotated[
        int | None,
        typer.Option("--min", min=0, help="Minimum number of workers, instead of WORKERS."),
    ] = None,
    maximum: Annotated[
        int | None,
        typer.Option("--max", min=0, help="Maximum number of workers, instead of WORKERS."),
    ] = None,
    version: Version = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Change how many workers serve a model, and wait until they are ready.

    Workers that failed are replaced.
    """
    if (count is not None) + (workers is not None) + (
        minimum is not None or maximum is not None
    ) != 1:
        raise UsageError(
            f"give the number of workers for '{name}' once: `tsx models scale {name} 2`, or --min"
            " and --max"
        )
    workers = count if workers is None else workers
    min_workers = workers if minimum is None else minimum
    max_workers = workers if maximum is None else maximum
    server, target = (server, ["models", name, *([] if version is None else [version])])
    is_finished = threading.Event()
    threading.Thread(
        target=_print_progress, args=(server, path(*target), is_finished), daemon=True
    ).start()
    answer = server.call(
        "PUT",
        path(*target, min_worker=min_workers, max_worker=max_workers, synchronous=not no_wait),
    ).json()
    is_finished.set()
    _print_status(answer, as_json)


@app.command("set", cls=AnswerCommand)
@with_server
def change(
    server: Server,
    name: ModelName,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="Limits, such as batch_size=8; an unknown name prints the list.",
        ),
    ],
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Change a model's limits while it is served.

    Workers continue, and other limits stay unchanged.
    """
    target = ["models", name, *([] if version is None else [version])]
    _print_status(server.call("PUT", path(*target, **_changes(values))).json(), as_json)


@app.command(cls=AnswerCommand)
@with_server
def set_default(
    server: Server,
    name: ModelName,
    number: Annotated[
        str | None,
        typer.Argument(
            metavar="[VERSION]", help="Version that answers requests without a version."
        ),
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="The same as an option.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the version that answers requests without a version."""
    if (version is None) == (number is None):
        raise UsageError(f"give the version once: `tsx models set-default {name} 2.0`")
    chosen_version = version or number or ""
    (description,) = server.call("GET", path("models", name, chosen_version)).json(list)
    if not description["workers"] and not description.get("asleep"):
        start = f"tsx models scale {quote(name)} 1 --version {quote(description['modelVersion'])}"
        text = "so requests without a version would fail. Start a worker first"
        raise CliError(f"version {chosen_version} of {name} has no workers, {text}: `{start}`")
    _print_status(
        server.call("PUT", path("models", name, chosen_version, "set-default")).json(), as_json
    )


@app.command(cls=AnswerCommand)
@with_server
def unregister(
    server: Server, name: ModelName, version: Version = None, as_json: AsJson = False
) -> None:
    """Unregister a model and stop its workers; the archive stays in the model store."""
    target = path("models", name, *([] if version is None else [version]))
    answer = server.call("DELETE", target).json()
    if version is not None and not as_json:
        answer["status"] += f": version {version}"
    _print_status(answer, as_json)


for _command in (
    traffic.traffic,
    traffic.label,
    traffic.rollback,
    record.record,
    monitor.monitor,
    rollout.rollout,
    shadow.shadow,
):
    app.command(cls=AnswerCommand)(_command)
app.add_typer(adapter.app, name="adapter")


def _register(server: Server, archive: str, as_json: bool, **query: object) -> None:
    """Make the server load an archive.

    For a path that exists on this machine, the digest is sent too. The server then refuses another
    file with the same path.
    """
    from rich.console import Console

    from tsx_archiver import ARCHIVE_SUFFIXES  # a slow import
    from tsx_archiver.storage.digest import content_digest

    local_path, url = Path(archive).absolute(), archive
    if local_path.is_file() or (local_path / MANIFEST).is_dir():
        if local_path.is_file() and not local_path.name.endswith(ARCHIVE_SUFFIXES):
            raise UsageError(f"'{archive}' is not an archive; `tsx archive {archive}` makes one")
        url = local_path.as_uri()
        if local_path.is_file():
            with local_path.open("rb") as file:
                url += f"#sha256={content_digest(file)}"
    status_text = f"{server.url} loads {local_path.name}".replace("[", r"\[")
    try:
        with Console(stderr=True, quiet=as_json).status(status_text):
            answer = server.call("POST", path("models", url=url, **query)).json()
    except RequestFailed as error:
        if error.type == ALREADY_REGISTERED:
            name = query["model_name"]
            arguments = quote(archive) + (f" --name {quote(str(name))}" if name else "")
            raise error.hinted(f"`tsx models replace {arguments}` replaces it") from None
        if url == archive or error.type not in UNREADABLE:
            raise
        _, is_outside_store, reason = error.message.rpartition(OUTSIDE_STORE)
        cause = (
            f"does not take {local_path}: an archive must be in the server's model store, or the server"
            " must have been started with it"
            if is_outside_store
            else f"cannot read {local_path} of this machine"
        )
        raise CliError(f"{server.url} {cause}. {reason}") from error
    _print_status(answer, as_json)


def _changes(values: list[str]) -> dict[str, str]:
    from tsx_archiver.metadata.model_limits import BY_KEY, CHANGEABLE  # a slow import

    changes = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise UsageError(
                f"`tsx models set` takes NAME=VALUE, such as batch_size=8, not '{text}'"
            )
        name = BY_KEY.get(name, name)
        if name not in (changeable_names := (*CHANGEABLE, "slo")):
            scale = "; did you mean `tsx models scale NAME 2`?" if "worker" in name.lower() else ""
            hint = (
                suggestion(name, changeable_names)
                or scale
                or f"; it can be {', '.join(changeable_names)}"
            )
            raise UsageError(f"'{name}' cannot be changed while a model is served{hint}")
        changes[name] = value
    return changes


def all_models(server: Server) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = []
    token: str | None = "0"
    while token is not None:
        page = server.call("GET", path("models", limit=PAGE, next_page_token=token)).json()
        models += page["models"]
        token = page.get("nextPageToken")
    return models


def _default_version(server: Server, name: str, versions: list[dict[str, Any]]) -> str:
    if len(versions) == 1:
        return str(versions[0]["modelVersion"])
    return str(server.call("GET", path("models", name)).json(list)[0]["modelVersion"])


def _row(answer: dict[str, Any], default: bool) -> list[object]:
    workers = answer["workers"]
    ready = _ready(answer)
    return [
        answer["modelName"],
        answer["modelVersion"],
        "yes" if default else "",
        f"{ready} of {answer['minWorkers']}" if ready != answer["minWorkers"] else ready,
        _devices(workers),
        answer["batchSize"],
        answer.get("jobQueueStatus", {}).get("pendingRequests", 0),
        answer["modelUrl"],
    ]


def _ready(answer: dict[str, Any]) -> int:
    return sum(worker["status"] == "READY" for worker in answer["workers"])


def _print_progress(server: Server, target: str, is_finished: threading.Event) -> None:
    """Print on stderr how many workers of a version are ready, until `is_finished` is set."""
    printed = ""
    while not is_finished.wait(PROGRESS_S):
        with suppress(CliError):  # The command itself reports errors.
            (version,) = server.call("GET", target).json(list)
            ready, target_count = _ready(version), version["minWorkers"]
            line = f"workers ready: {ready} of {target_count}"
            if line != printed and ready < target_count:
                print(line, file=sys.stderr, flush=True)
            printed = line


def _devices(workers: list[dict[str, Any]]) -> str:
    """Return the distinct devices of workers; a GPU has its number if the server reports it."""
    numbers = [
        worker["gpuUsage"].partition("gpuId::")[2].partition(" ")[0]
        for worker in workers
        if worker["gpu"]
    ]
    gpus = (
        f"gpu {', '.join(sorted({number for number in numbers if number}))}".rstrip()
        if numbers
        else ""
    )
    return ", ".join(filter(None, ["cpu" if len(numbers) < len(workers) else "", gpus]))


def _print_version(answer: dict[str, Any]) -> None:
    facts = [
        (name, value)
        for name, value in answer.items()
        if not isinstance(value, (dict, list)) and name not in ("status", "lastError")
    ]
    facts += [(f"measured {name}", value) for name, value in answer.get("measured", {}).items()]
    facts += [
        (f"{part} {name}", value)
        for part in ("slo", "cache", "addedAdapters")
        for name, value in answer.get(part, {}).items()
    ]
    queue = answer.get("jobQueueStatus", {})
    facts += [(name, queue[name]) for name in queue]
    facts = [(name, rounded(value) if isinstance(value, float) else value) for name, value in facts]
    print_table([answer["modelName"], answer["modelVersion"]], facts)
    workers = [
        (
            worker["id"],
            worker["status"],
            worker.get("pid"),
            "gpu" if worker["gpu"] else "cpu",
            human(worker["memoryUsage"]),
            worker["startTime"],
        )
        for worker in answer["workers"]
    ]
    if workers:
        print_table(["worker", "status", "pid", "device", "memory", "since"], workers)
    for reason in answer.get("formsPassedOver", ()):
        print(escaped(f"form not used: {reason}"))
    for name in ("status", "lastError"):
        if answer.get(name):
            print(escaped(str(answer[name]).rstrip()))


def _print_status(answer: dict[str, Any], as_json: bool) -> None:
    print_result(
        answer, as_json, lambda answer: print(escaped(with_next_command(answer["status"])))
    )


def with_next_command(status: str) -> str:
    """Append a command to the server's message, as the next step.

    The command contains the version, since another version may be the default.
    """
    return WITHOUT_WORKERS.sub(r"\1 `tsx models scale \2 1 --version \3` adds one.", status)
