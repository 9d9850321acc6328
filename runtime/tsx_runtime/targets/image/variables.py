"""Reads the environment variables of a platform: whole numbers, flags, words; an unusable value raises SettingError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsx_runtime.errors import SettingError
from tsx_runtime.shared.suggestions import suggestion


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """The settings in a platform's variables, as tsx's settings."""

    variables: dict[str, str]  # TSX_*, as a server's settings are read from
    order: dict[str, Any]  # of each model's registration


def text_of(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def whole(env: Mapping[str, str], name: str) -> int | None:
    """None where it is not set."""
    text = text_of(env, name)
    if text and not text.isdecimal():
        raise SettingError(f"{name} is '{text}'; it takes a whole number")
    return int(text) if text else None


def number(env: Mapping[str, str], name: str, default: float) -> float:
    text = text_of(env, name)
    try:
        value = float(text or default)
    except ValueError:
        value = -1
    if not 0 <= value < 1e6:
        raise SettingError(f"{name} is '{text}'; it takes a number that is not negative")
    return value


def port_of(name: str, text: str) -> int:
    value = whole({name: text}, name) or 0
    if not 0 < value < 1 << 16:
        raise SettingError(f"{name} is '{text}', which is not a port")
    return value


def flag(env: Mapping[str, str], name: str) -> bool | None:
    """None where it is not set."""
    text = text_of(env, name).lower()
    if text and text not in ("true", "false"):
        raise SettingError(f"{name} is '{text}'; it takes true or false")
    return text == "true" if text else None


def one_of(env: Mapping[str, str], name: str, words: Sequence[str]) -> str:
    """In lower case, as `words` are; empty where it is not set."""
    text = text_of(env, name)
    if text and text.lower() not in words:
        raise SettingError(f"{name} is '{text}'{suggestion(text.lower(), words) or '.'} Use one of {', '.join(words)}")
    return text.lower()
