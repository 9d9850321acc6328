"""`tsx models adapter` changes the LoRA adapters of a model while it is served."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tsx_cli.common.client import AnswerCommand, Server, path
from tsx_cli.common.management import with_server
from tsx_cli.common.options import ModelName

Adapter = Annotated[str, typer.Argument(help="Name of the adapter.", show_default=False)]

app = typer.Typer(
    add_completion=False,
    help="Add LoRA adapters to a model that is served, or remove them.",
    no_args_is_help=True,
)


@app.command(cls=AnswerCommand)
@with_server
def add(
    server: Server,
    name: ModelName,
    adapter: Adapter,
    source: Annotated[
        str,
        typer.Option(
            "--path",
            help="A directory in the server's model store, hf:ORG/NAME, or the URL of a directory.",
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the adapter that has this name.")
    ] = False,
) -> None:
    """Add an adapter to all workers of a model."""
    _change(server, "load", model=name, lora_name=adapter, lora_path=source, load_inplace=replace)


@app.command(cls=AnswerCommand)
@with_server
def remove(server: Server, name: ModelName, adapter: Adapter) -> None:
    """Remove an adapter that was added; requests that use it end first."""
    _change(server, "unload", model=name, lora_name=adapter)


def _change(server: Server, action: str, **fields: object) -> None:
    answer = server.call("POST", path("v1", f"{action}_lora_adapter"), json.dumps(fields).encode())
    print(answer.body().decode())
