"""`cache` of a model: how many bytes of answers the server stores, for how long, and which headers tell requests apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tsx_archiver.quantities import parse_bytes, parse_seconds, where_text

USAGE = "it must be a mapping such as {size: 64MiB, ttl: 60s, key: [x-user]}"
_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


@dataclass(frozen=True)
class CacheConfig:
    """The keys under `cache`."""

    size: int = 64 << 20  # bytes; 0 turns the cache off
    ttl: float = 60.0  # seconds
    key: tuple[str, ...] = ()  # names of headers, in lower case


def read_cache(value: Any) -> tuple[CacheConfig | None, str | None]:
    """The value, or None and the reason why it cannot be used."""
    known = CacheConfig.__dataclass_fields__
    if not isinstance(value, dict):
        return None, USAGE
    if unknown := [name for name in value if name not in known]:
        return None, f"{unknown[0]} is not a known key; the known keys are {', '.join(known)}"
    config = CacheConfig(**value)
    try:
        size, ttl = where_text(parse_bytes)(config.size), where_text(parse_seconds)(config.ttl)
    except ValueError:
        size = ttl = None
    names = [config.key] if isinstance(config.key, str) else config.key
    if type(size) is not int or size < 0 or type(ttl) not in (int, float) or not 0 < ttl < 1e9:
        return None, "size must be a number of bytes such as 64MiB (0: off), and ttl a time greater than 0 such as 60s"
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and _HEADER.fullmatch(name) for name in names):
        return None, "key must be names of headers, such as [x-user]"
    return CacheConfig(size, float(ttl), tuple(name.lower() for name in names)), None
