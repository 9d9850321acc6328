"""`tsx init` creates the files of a new model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsx_cli.common.failure import CliError, UsageError

app = typer.Typer(add_completion=False)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; a new directory NAME if not given."),
    ] = None,
    handler: Annotated[
        bool,
        typer.Option("--handler", help="Write a network and a handler as TorchServe has them."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")] = False,
) -> None:
    """Write a Python file that `tsx serve` serves, and a README with the next commands."""
    from tsx_archiver import is_model_name  # a slow import
    from tsx_cli.archive.python_files.models import model_name
    from tsx_cli.common.run_directory import write_files
    from tsx_templates.render import render_tree

    if not is_model_name(name):
        raise UsageError(
            f"'{name}' cannot be a model's name: letters, digits, '_', '-' and '.' only, a letter"
            " or digit first"
        )
    target = output or Path(name)
    kind = class_name(name)
    values = {"name": name, "class_name": kind, "model": model_name(kind)}
    tree = render_tree("model" if handler else "python_file", values)
    files = {str(path): text for path, text in tree.items()}
    existing = [str(target / path) for path in files if (target / path).exists()]
    if existing and not force:
        raise CliError(
            f"{', '.join(existing)} would be overwritten; choose another --output, or add --force"
        )
    for path in write_files(files, target):
        print(f"wrote {path}")
    print(f"{target / 'README.md'} has the next steps")


def class_name(name: str) -> str:
    """Derive a class name: `MyModelV2` from `my-model.v2`."""
    parts = "".join(char if char.isalnum() else " " for char in name).split()
    capitalized = "".join(part[0].upper() + part[1:] for part in parts)
    return capitalized if capitalized[0].isalpha() else f"Model{capitalized}"
