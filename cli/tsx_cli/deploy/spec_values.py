"""Types of the values in a specification, as files and options give them."""

from __future__ import annotations

import re
import sys
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from tsx_archiver.quantities import for_text, parse_percent, parse_seconds
from tsx_cli.common.failure import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = re.compile(r"[a-z0-9](-?[a-z0-9])*")
# SageMaker's names have up to 63 characters, and tsx appends suffixes to a deployment's name.
MAX_NAME_CHARS = 40
MEMORY = r"^[1-9]\d*(Mi|Gi)$"
ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", re.ASCII)


def seconds(text: str) -> int:
    try:
        return round(parse_seconds(text))
    except ValueError:
        raise ValueError("write a time such as 90s, 10m or 1h") from None


def span(text: str, option: str) -> float:
    """Parse a duration into seconds.

    Raises:
        UsageError: The text is not a duration.
    """
    try:
        return seconds(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error} (it is '{text}')") from error


Seconds = Annotated[int, BeforeValidator(for_text(seconds))]


def split_list(value: object) -> object:
    """Split `a,b`, the form of lists in `--set`."""
    return (
        [item.strip() for item in value.split(",") if item.strip()]
        if isinstance(value, str)
        else value
    )


def table(value: object) -> object:
    """Parse a TOML table such as `{"a.com/pool" = "gpu"}`, for keys with dots in `--set`."""
    try:
        return tomllib.loads(f"value = {value}")["value"] if isinstance(value, str) else value
    except tomllib.TOMLDecodeError:
        raise ValueError('write {"KEY" = "VALUE"}') from None


def whole_number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def role(value: object) -> object:
    if isinstance(value, str) and not ROLE.fullmatch(value):
        raise ValueError("a role must be an ARN, such as arn:aws:iam::123456789012:role/digits")
    return value


def own_name(name: str) -> str:
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ValueError(
            f"a name has up to {MAX_NAME_CHARS} lower-case letters, digits and single hyphens"
            " between them"
        )
    return name


OwnName = Annotated[str, AfterValidator(own_name)]
Role = Annotated[str, BeforeValidator(role)]
TextList = Annotated[tuple[str, ...], BeforeValidator(split_list)]
Percent = Annotated[float, BeforeValidator(for_text(parse_percent))]


Labels = Annotated[dict[str, str], BeforeValidator(table)]


class SpecSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
