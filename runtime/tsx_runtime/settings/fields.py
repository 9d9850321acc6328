"""The types of settings, and the base classes for the settings of features."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tsx_archiver.metadata.slo import checked_target
from tsx_archiver.quantities import for_text, parse_bytes, parse_seconds, parse_share
from tsx_runtime.settings.addresses import FORMS, parse_address
from tsx_runtime.settings.addresses import Address as ParsedAddress
from tsx_runtime.settings.model_limits import Accepts

SQLITE = "sqlite:///"
POSTGRES = ("postgresql://", "postgres://")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
SettingsT = TypeVar("SettingsT", bound=BaseModel)


def _check_address(value: str) -> str:
    parse_address(value)
    return value


def _check_pattern(value: str | None) -> str | None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(str(error)) from error
    return value


Pattern = Annotated[str | None, AfterValidator(_check_pattern), Accepts("a regular expression")]


def check_store(value: str) -> str:
    """Check the location of a store: a file, or a URL of SQLite or PostgreSQL.

    Raises:
        ValueError: It is neither.
    """
    path = value.removeprefix(SQLITE)
    if (
        not path
        or "\0" in path
        or (
            _SCHEME.match(path)
            and len(path) > 1
            and path[1] != ":"
            and not path.startswith(POSTGRES)
        )
    ):
        raise ValueError("it names no store")
    return value


def to_lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _parse_fraction(value: object) -> object:
    """Convert true, false, a number from 0 to 1, or a percentage to a fraction."""
    if isinstance(value, str):
        text = value.strip().lower()
        fractions = {"true": 1.0, "full": 1.0, "false": 0.0, "off": 0.0}
        return fractions[text] if text in fractions else parse_share(text)
    return float(value) if isinstance(value, bool | int) else value


def table_or_flag(value: Any) -> Any:
    """Parse a table that may be JSON; true is the table without keys."""
    if isinstance(value, str):
        value = json.loads(value)
    return {} if value is True else value


Size = Annotated[
    int,
    BeforeValidator(for_text(parse_bytes)),
    Field(ge=1),
    Accepts("a number of bytes, or a size such as 100MB or 8GB"),
]
IdleTime = Annotated[
    float,
    BeforeValidator(for_text(parse_seconds)),
    Field(ge=0),
    Accepts("a number of seconds, or a time such as 30s, 10m or 2h"),
]
LogFraction = Annotated[
    float,
    BeforeValidator(_parse_fraction),
    Field(ge=0, le=1),
    Accepts("true, false, a number from 0 to 1, or a percentage"),
]


def _check_header(value: str) -> str:
    if not value.isascii() or not value.isprintable() or not value.strip():
        raise ValueError("it cannot be the value of a header")
    return value.strip()


HeaderText = Annotated[str, AfterValidator(_check_header), Accepts("text that a header can carry")]
Address = Annotated[str, AfterValidator(_check_address), Accepts(f"an address: {FORMS}")]


BatchBuckets = Annotated[
    list[Annotated[int, Field(ge=1)]],
    Accepts("numbers of requests, each at least 1: a list, or a string with commas"),
]


def _check_networks(values: list[str]) -> list[str]:
    for value in values:
        ipaddress.ip_network(value)
    return values


SloText = Annotated[
    str, AfterValidator(checked_target), Accepts("one percentile and a time, such as p99<50ms")
]
Networks = Annotated[
    list[str],
    AfterValidator(_check_networks),
    Accepts("addresses and networks, such as 10.0.0.7 or 10.0.0.0/8"),
]


class Secret:
    """The mark of a setting that is a secret: it is neither shown nor passed to workers."""


class Described(BaseModel):
    """Settings whose descriptions are the strings below the fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


class ServerSettings(Described):
    """Settings of a server."""

    def addresses(self) -> dict[str, ParsedAddress]:
        """Return the addresses at which these settings let the server listen, by role."""
        return {}


class FeatureSettings(ServerSettings):
    """The settings of a feature, which are a part of the server's `Settings`."""

    @classmethod
    def of(cls: type[SettingsT], settings: BaseModel) -> SettingsT:
        """Return the settings of a server, typed as an instance of this class."""
        assert isinstance(settings, cls)
        return settings


class FeatureModelSettings(Described):
    """The settings of a feature for one model, which are a part of `ModelSettings`."""

    @classmethod
    def of(cls: type[SettingsT], models: Mapping[str, BaseModel], model: str) -> SettingsT:
        """Return the settings of a model, typed as an instance of this class."""
        settings = models.get(model, cls())
        assert isinstance(settings, cls)
        return settings
