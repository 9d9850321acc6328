"""Options that several commands share, and the resulting settings."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tsx_cli.common.failure import CliError, UsageError

if TYPE_CHECKING:
    from tsx_archiver import Limits, OpenArchive
    from tsx_runtime.settings.schema import Settings

COMPLETION_TIMEOUT_S = 2.0
Shared = TypeVar("Shared")
Result = TypeVar("Result")

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Read settings from this file instead of ./tsx.toml."
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set any setting; may be repeated. `tsx config show` lists them.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Handler = Annotated[
    str | None,
    typer.Option(
        "--handler",
        metavar="NAME|FILE.py[:FUNCTION]",
        help="Handler: a built-in one, or your own file.",
    ),
]
ModelFile = Annotated[
    Path | None,
    typer.Option(
        "--model-file",
        metavar="FILE[:CLASS]",
        help="Python file with the model's class, for a file that contains only weights.",
    ),
]
ExtraFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--extra-files", metavar="FILE,...", help="Other files the handler needs; may be repeated."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(help="Task of a Hugging Face model, where its directory does not tell it."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=DIR",
        help=(
            "PEFT adapter of a Hugging Face model, which requests choose by NAME; may be repeated."
        ),
    ),
]
InputOption = Annotated[
    str | None, typer.Option("--input", metavar="FILE", help="The same as the argument FILE.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Accept versions that are not registered yet.")
]


def _complete_models_of(role: str) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion with the names of the models on the command's server."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        from tsx_cli.common.client import Server, reading_answers  # a slow import
        from tsx_runtime.errors import SettingError

        try:
            settings, _ = read_settings(context.params.get("config"), quiet=True)
            url = context.params.get("url") or getattr(settings, f"{role}_address")
            server = Server(
                url,
                getattr(settings, f"{role}_token"),
                role=role,
                certificate=settings.certificate_file,
                timeout=COMPLETION_TIMEOUT_S,
            )
            with reading_answers():
                names = server.call("GET", "/v1/models").json()["models"]
                return [name for name in names if name.startswith(incomplete)]
        except (CliError, SettingError, OSError):  # Completion shows no errors.
            return []

    return complete


ModelName = Annotated[
    str, typer.Argument(help="Name of the model.", autocompletion=_complete_models_of("management"))
]
PredictedModel = Annotated[
    str, typer.Argument(help="Name of the model.", autocompletion=_complete_models_of("inference"))
]
Token = Annotated[
    str | None,
    typer.Option(metavar="TOKEN|@FILE", help="Token for the server, or the file that contains it."),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help=(
            "Address of the server; by default from the settings, as is its token: "
            "set TSX_MANAGEMENT_TOKEN, or TSX_INFERENCE_TOKEN for predictions."
        ),
    ),
]


def with_options(
    shared: Callable[..., Shared], *, last: bool = False
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Add the options of `shared` to a command, which gets their result as its first argument.

    They stand before the command's own options, or `last`. typer reads the options from a
    function's signature, so the decorator builds a new signature.
    """
    shared_parameters = inspect.signature(shared, eval_str=True).parameters

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        _, *own_parameters = inspect.signature(command, eval_str=True).parameters.values()

        def run(**options: Any) -> Result:
            return command(
                shared(**{name: options.pop(name) for name in shared_parameters}), **options
            )

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (
                *([] if last else shared_parameters.values()),
                *own_parameters,
                *(shared_parameters.values() if last else []),
            )
        ]
        # `inspect.signature` reads this attribute first.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def read_settings(
    config: Path | None,
    assignments: Iterable[str] | None = None,
    *,
    quiet: bool = False,
    **options: object,
) -> tuple[Settings, dict[str, str]]:
    """Return the settings of this invocation and their origins.

    Args:
        config: The file of `--config`.
        assignments: The values of `--set`.
        quiet: Whether to suppress notices.
        **options: Values of further options; None means that an option is absent.

    Raises:
        SettingError: A setting is invalid.
    """
    # These modules are slow to import, and --help needs none of them.
    from tsx_runtime.settings.sources import find_config, load_settings

    cli: dict[str, object] = dict(
        read_pair(assignment, "--set takes NAME=VALUE") for assignment in assignments or []
    )
    cli.update((name, value) for name, value in options.items() if value is not None)
    warn: Callable[[str], None] = (
        (lambda notice: None) if quiet else lambda notice: print(notice, file=sys.stderr)
    )
    return load_settings(cli, os.environ, find_config(config, os.environ, Path.cwd()), warn)


def open_cached(path: Path, settings: Settings) -> OpenArchive:
    """Open an archive with the cache and the limits of the settings.

    Raises:
        ArchiveError: The archive cannot be read.
    """
    from tsx_archiver import open_archive

    return open_archive(path, cache=settings.archive_cache(), limits=settings.archive_limits())


def archive_limits(*, quiet: bool = True) -> Limits:
    """Return the limits for archives that a server with the same settings has.

    Most commands call this several times; therefore no notices are printed by default.
    """
    return read_settings(None, quiet=quiet)[0].archive_limits()


def read_option(parse: Callable[[str], float], text: str, option: str, usage: str) -> float:
    """Parse the value of an option.

    Raises:
        UsageError: The value is invalid.
    """
    try:
        return parse(text)
    except ValueError:
        raise UsageError(f"{option} takes {usage}, not {text!r}") from None


def finite(value: float, option: str) -> float:
    """Refuse infinity and NaN, which pass the range checks of the command line.

    Raises:
        UsageError: The value is not finite.
    """
    if not math.isfinite(value):
        raise UsageError(f"{option}: {value} is not a number; write one such as 50")
    return value


def read_pair(text: str, usage: str) -> tuple[str, str]:
    """Split `NAME=VALUE`.

    Raises:
        UsageError: The text has another form; the message begins with `usage`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{usage}, not '{text}'")
    return name, value


def refuse_others(context: typer.Context, known: Iterable[str], reason: str) -> None:
    """Refuse options whose parameters are not in `known`.

    Raises:
        UsageError: The command line contains such an option.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in known:
            raise UsageError(f"{reason}; leave {parameter.opts[0]} out")


def read_token(value: str | None, option: str = "--token") -> str | None:
    """Return a token; `@FILE` reads it from a file.

    Raises:
        UsageError: The token is invalid.
        CliError: The file cannot be read.
    """
    if value is None:
        return None
    token = value
    if value.startswith("@"):
        try:
            token = Path(value[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise CliError(f"{option}: {value[1:]} cannot be read: {reason}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"{option}: a token is one word of plain letters, digits and signs; @FILE reads it from"
            " a file"
        )
    return token
