"""`tsx serve`: the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tsx_cli.archive.trust import TrustOptions, TrustPickle, TrustRemoteCode
from tsx_cli.common.inputs import split_list
from tsx_cli.common.options import (
    Adapters,
    Assignments,
    Config,
    ExtraFiles,
    Handler,
    ModelFile,
    Task,
    read_settings,
)

app = typer.Typer(add_completion=False)


@app.command("serve")
def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]FILE...",
            help=(
                "Archives of models or workflows, directories of models (MLflow's and Hugging"
                " Face's as well), model files; "
                "file names in the stores; hf:ORG/NAME@REVISION; or models:/NAME/VERSION."
            ),
        ),
    ] = None,
    handler: Handler = None,
    model_file: ModelFile = None,
    extra_files: ExtraFiles = None,
    task: Task = None,
    adapters: Adapters = None,
    trust_remote_code: TrustRemoteCode = False,
    trust_pickle: TrustPickle = False,
    model_store: Annotated[
        Path | None, typer.Option(help="Directory that models are registered from.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host name or IP address to listen on.")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port for predictions; 0 chooses a free one."),
    ] = None,
    management_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for managing models.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for Prometheus.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for gRPC predictions.")
    ] = None,
    grpc_management_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for managing models over gRPC.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of workers per model.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of requests in a batch.")
    ] = None,
    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Where the models run.")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Take the addresses over from the server that runs there."),
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Load a model again when one of its files changes.")
    ] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Serve archives, model directories or bare model files until Ctrl-C or SIGTERM.

    Without a file, the server loads what the settings `load_models` and `load_workflows` name, or
    starts empty.
    """
    # These modules are slow to import, and --help needs none of them.
    from tsx_cli.archive.huggingface import HuggingFaceOptions
    from tsx_cli.archive.model_file import HandlerFiles
    from tsx_cli.serve.arguments import serve_arguments
    from tsx_cli.serve.server import with_addresses, with_grpc_addresses

    settings, _ = read_settings(config, assignments, model_store=model_store)
    settings = with_addresses(
        settings, host, {"inference": port, "management": management_port, "metrics": metrics_port}
    )
    settings = with_grpc_addresses(
        settings, host, {"grpc_inference": grpc_port, "grpc_management": grpc_management_port}
    )
    registration_options = {
        "initial_workers": workers,
        "batch_size": batch_size,
        "device_type": device,
    }
    parts, huggingface = (
        HandlerFiles(handler, model_file, split_list(extra_files)),
        HuggingFaceOptions(task, adapters or []),
    )
    serve_arguments(
        models or [],
        settings,
        parts,
        registration_options,
        huggingface,
        trust=TrustOptions(trust_remote_code, trust_pickle),
        replaces=replace,
        reload=reload,
    )
