"""`tsx config`: shows the settings and their origins."""

from __future__ import annotations

import typer

from tsx_cli.common.options import AsJson, Assignments, Config, read_settings
from tsx_cli.common.output import print_json, print_table

app = typer.Typer(add_completion=False, help="Show every setting and where its value came from.", no_args_is_help=True)


@app.callback()
def config() -> None:
    pass


@app.command()
def show(config: Config = None, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Print each setting, its value and where that came from: command line, environment, tsx.toml or default."""
    from tsx_runtime.settings.schema import MODELS, SECRETS  # here, as they are slow to import, and help must be quick
    from tsx_runtime.shared.redaction import redacted_values

    settings, origins = read_settings(config, assignments)
    shown = settings.model_dump(mode="json", exclude={MODELS})
    for model, own in settings.models.items():
        shown |= {f"{MODELS}.{model}.{name}": value for name, value in own.model_dump(exclude_none=True).items()}
    values = {name: "(hidden)" if name in SECRETS and value else redacted_values(value) for name, value in shown.items()}
    if as_json:
        print_json({name: {"value": value, "origin": origins[name]} for name, value in values.items()})
        return
    rows = [(name, _shown(value), origins[name], _what(name)) for name, value in values.items()]
    print_table(["setting", "value", "from", "what it is"], rows)


def _what(name: str) -> str | None:
    from tsx_runtime.settings.schema import MODELS, ModelSettings, Settings  # as above

    fields = ModelSettings.model_fields if name.startswith(f"{MODELS}.") else Settings.model_fields
    return fields[name.rpartition(".")[2]].description


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
