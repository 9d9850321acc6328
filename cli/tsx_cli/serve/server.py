"""The server of `tsx serve` and `torchserve`, started from arguments and settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.output import one_line
from tsx_cli.serve.startup_page import overwrite, progress_line, show
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.nonblocking_output import install_lossy_output
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.targets.observability.logging_setup import set_up_logging
from tsx_runtime.targets.server.server import DEFAULT_OPTIONS, RunningServer, ServeOptions, serve
from tsx_runtime.targets.server.startup import StartModel, StartWorkflow


def with_grpc_addresses(
    settings: Settings, host: str | None, ports: dict[str, int | None]
) -> Settings:
    """Return the settings with the host and gRPC ports of the command line."""
    changed_settings: dict[str, Any] = {}
    for role, port in ports.items():
        if host is not None:
            changed_settings[f"{role}_address"] = host.strip("[]")
        if port is not None:
            changed_settings[f"{role}_port"] = port
    return settings.model_copy(update=changed_settings)


def with_addresses(settings: Settings, host: str | None, ports: dict[str, int | None]) -> Settings:
    """Return the settings with the host and the ports of the command line."""
    if host is not None and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]  # an IPv6 address as in URLs
    changed_settings = {}
    for role, port in ports.items():
        setting = f"{role}_address"
        address = parse_address(getattr(settings, setting))
        if address.scheme == "unix" and (host, port) != (None, None):
            if port is None:
                raise UsageError(
                    f"{setting} is {address}, which has no host; give a port as well, or remove --host"
                )
            address = parse_address("http://127.0.0.1:0")
        changed_settings[setting] = str(
            address._replace(
                host=address.host if host is None else host,
                port=address.port if port is None else port,
            )
        )
        try:
            parse_address(changed_settings[setting])
        except ValueError:
            raise UsageError(
                f"--host takes a name or an address such as 127.0.0.1, not '{host}'"
            ) from None
    return settings.model_copy(update=changed_settings)


def run_server(
    settings: Settings,
    starts: list[StartModel],
    workflows: list[StartWorkflow],
    *,
    ready_line: str | None = None,
    options: ServeOptions = DEFAULT_OPTIONS,
) -> None:
    """Serve until the server is stopped.

    `ready_line` is printed when the server answers requests, for programs that wait for it.
    """
    if settings.model_store is not None and not settings.model_store.is_dir():
        raise CliError(
            f"the model store '{settings.model_store}' is not a directory; create it, or name"
            " another with --model-store"
        )
    # A full disk, or a terminal that is gone or blocked, must not stop the server.
    install_lossy_output()
    set_up_logging(settings)
    console = Console()
    if console.is_terminal and (starts or workflows):
        source_text = one_line(
            redacted(
                ", ".join(
                    [
                        *(start.order.url for start in starts),
                        *(start.order.url for start in workflows),
                    ]
                )
            )
        )
        overwrite(f"loading {source_text} ...", console)
        options = replace(
            options,
            on_loading=lambda status: overwrite(progress_line(source_text, status), console),
        )

    def on_ready(started: RunningServer) -> None:
        overwrite("", console)
        show(started, settings, console)
        if ready_line is not None:
            print(ready_line, flush=True)

    try:
        serve(settings, starts, on_ready, options, workflows)
    except BaseException:
        overwrite("", console)
        raise
