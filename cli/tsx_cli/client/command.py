"""`tsx client` generates Python code for tsx-client from the models of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import Config, read_settings

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def client() -> None:
    """Tools for programs that call a server with the package tsx-client."""


@app.command()
def generate(
    url: Annotated[
        str | None, typer.Argument(help="Address of predictions; by default from the settings.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Python file to write; standard output if not given."),
    ] = None,
    config: Config = None,
) -> None:
    """Write Python that names a server's models and inputs, for editors and type checkers."""
    try:
        import tsx_client  # a separate distribution
        from tsx_client.stubs import generate
    except ImportError as error:
        raise UsageError(
            "`tsx client` needs the package tsx-client: pip install tsx-client"
        ) from error
    from tsx_cli.common.server_address import trusting  # a slow import

    settings, _ = read_settings(config)
    address, verify = url or settings.inference_address, trusting(settings.certificate_file)
    try:
        with tsx_client.Client(address, token=settings.inference_token, verify=verify) as server:
            text = generate(server)
    except tsx_client.ClientError as error:
        raise CliError(f"the models of {address} are not known: {error}") from error
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
