"""`tsx models adapter` changes the LoRA adapters of a model while it is served."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tsx_cli.common.client import AnswerCommand, Server, path
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson
from tsx_cli.common.output import print_result, print_table

Adapter = Annotated[str, typer.Argument(help="Name of the adapter.", show_default=False)]
Model = Annotated[str, typer.Argument(metavar="NAME[:VERSION]", help="Name of the model.")]

app = typer.Typer(
    add_completion=False,
    help="Add LoRA adapters to a model that is served, list them, and remove them.",
    no_args_is_help=True,
)


@app.command(cls=AnswerCommand)
@with_server
def add(
    server: Server,
    name: Model,
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
    body = {"model": name, "lora_name": adapter, "lora_path": source, "load_inplace": replace}
    _change(server, "load", body)


@app.command(cls=AnswerCommand)
@with_server
def remove(server: Server, name: Model, adapter: Adapter) -> None:
    """Remove an adapter that was added; requests that use it end first."""
    _change(server, "unload", {"model": name, "lora_name": adapter})


@app.command("list", cls=AnswerCommand)
@with_server
def list_adapters(server: Server, name: Model, as_json: AsJson = False) -> None:
    """List the adapters that were added, and where they come from."""
    (description,) = server.call("GET", path("models", *name.split(":", 1))).json(list)
    adapters = description.get("addedAdapters") or {}
    print_result(adapters, as_json, lambda rows: print_table(["adapter", "path"], rows.items()))


def _change(server: Server, action: str, body: dict[str, object]) -> None:
    target = path("v1", f"{action}_lora_adapter")
    answer = server.call("POST", target, json.dumps(body).encode())
    print(answer.body().decode())
