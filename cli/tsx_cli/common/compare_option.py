"""The options `--compare HOW` and `--ignore FIELD`, which define how responses are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tsx_cli.common.failure import UsageError

_NUMBERS = {"rtol": float, "atol": float, "k": int, "timeout": float}

Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Fields of JSON answers to ignore: a.b, or a.*.b."),
]


def read_compare(text: str) -> dict[str, Any]:
    """Convert the text of `--compare` to the JSON form of a comparison.

    Raises:
        UsageError: The text is invalid.
    """
    kind, _, options = text.partition(":")
    fields: dict[str, Any] = {"kind": kind}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if kind == "plugin" and not equals and "name" not in fields:
            fields["name"] = key
            continue
        try:
            fields[key] = _NUMBERS[key](value)
        except (KeyError, ValueError):
            raise UsageError(
                "--compare takes numeric:rtol=1e-3,atol=1e-6, exact, top-k:k=5 or"
                f" plugin:NAME,timeout=1; not '{text}'"
            ) from None
    return fields


def comparison_text(
    compare: Mapping[str, Any], tolerance: Mapping[str, float] | None = None
) -> str:
    """Describe a comparison.

    Args:
        compare: The comparison.
        tolerance: The tolerance that applies if the comparison has none.
    """
    options = [
        f"{key} {value}"
        for key, value in {**compare, **(tolerance or {})}.items()
        if key not in ("kind", "ignore")
    ]
    ignored_text = [f"without {', '.join(compare['ignore'])}"] if compare.get("ignore") else []
    return ", ".join([compare["kind"], *options, *ignored_text])
