"""`tsx models monitor` starts and stops the monitoring of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tsx_cli.common.client import Server, path
from tsx_cli.common.failure import UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson, ModelName
from tsx_cli.common.output import one_line, print_result


@with_server
def monitor(
    server: Server,
    name: ModelName,
    share: Annotated[str | None, typer.Option(help="Share of the requests, such as 5%.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML or JSON with the keys of `monitor` in model-config.yaml."
        ),
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="Stop monitoring; what is stored stays.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start, change or stop the monitoring of a model; without options, show its state.

    `tsx monitor show` prints the drift, the quality and the groups.
    """
    if off and (share or file):
        raise UsageError("--off ends the monitoring; use it without --share and --file")
    target, keys = path("models", name, "monitor"), dict[str, Any]()
    if file is not None:
        from tsx_archiver.metadata.safeyaml import load_yaml_file  # a slow import

        keys = load_yaml_file(file)
        if not isinstance(keys, dict) or not keys:
            raise UsageError(f"--file {file}: write the keys of `monitor`, such as share: 5%")
    if share is not None:
        keys["share"] = share
    method = "PUT" if keys else "DELETE" if off else "GET"
    print_result(server.call_json(method, target, keys or None), as_json, _show)


def _show(answer: dict[str, Any]) -> None:
    name = one_line(answer["model"])
    if answer["monitoring"]:
        share = f"{answer['config']['share']:g} % of the requests are examined"
        print(f"{name}: {share}, {answer['samples']:,} so far; `tsx monitor show {name}`")
    else:
        print(f"{name}: not monitored; `tsx models monitor {name} --share 5%` starts it")
