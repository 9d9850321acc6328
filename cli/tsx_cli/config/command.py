"""`tsx config`: shows the settings and their origins."""

from __future__ import annotations

import typer

from tsx_cli.common.options import AsJson, Assignments, Config, read_settings
from tsx_cli.common.output import print_json, print_table

app = typer.Typer(
    add_completion=False,
    help="Show every setting and where its value came from.",
    no_args_is_help=True,
)


@app.callback()
def config() -> None:
    pass


@app.command()
def show(config: Config = None, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Print each setting with its value and its origin.

    Origins are the command line, the environment, tsx.toml and the default.
    """
    from tsx_runtime.settings.schema import description_of, displayed  # a slow import

    settings, origins = read_settings(config, assignments)
    values = displayed(settings)
    if as_json:
        print_json(
            {name: {"value": value, "origin": origins[name]} for name, value in values.items()}
        )
        return
    rows = [
        (name, _shown(value), origins[name], description_of(name)) for name, value in values.items()
    ]
    print_table(["setting", "value", "from", "what it is"], rows)


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
