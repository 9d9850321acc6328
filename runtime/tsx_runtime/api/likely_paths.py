"""The hint of a 404: the most similar path, or the address that has the path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.errors import ResourceNotFound
from tsx_runtime.shared.suggestions import nearest

MAX_PATH_CHARS = 200  # longer paths are not compared
INDEX = "GET / lists the paths of this address."


class Match(NamedTuple):
    mistakes: int  # number of segments that differ
    path: str


class LikelyPaths:
    """The paths of one listener, as OpenAPI templates such as `/models/{model}`."""

    def __init__(
        self, paths: Iterable[str] = (), other_listeners: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        """Take the paths of this listener, and the paths of other listeners by address."""
        self._paths = _split(paths)
        self._other_listeners = {
            address: _split(paths) for address, paths in (other_listeners or {}).items()
        }

    def not_found(self, path: str) -> ResourceNotFound:
        """Return the error for a percent-decoded path."""
        hint = INDEX
        if len(path) <= MAX_PATH_CHARS:
            segments = path.strip("/").split("/")
            match = _best(segments, self._paths)
            address = next(
                (
                    address
                    for address, templates in self._other_listeners.items()
                    if (other_match := _best(segments, templates)) and not other_match.mistakes
                ),
                "",
            )
            if address and (match is None or match.mistakes):
                hint = f"It is on {address}."
            elif match is not None:
                hint = f"Did you mean {match.path}?"
        return ResourceNotFound(f"{NOT_FOUND} {hint}")


def _split(paths: Iterable[str]) -> list[list[str]]:
    return [path.strip("/").split("/") for path in dict.fromkeys(paths)]


def _best(segments: list[str], templates: list[list[str]]) -> Match | None:
    return min(
        filter(None, (_match(segments, template) for template in templates)),
        key=lambda match: match.mistakes,
        default=None,
    )


def _match(segments: list[str], template: list[str]) -> Match | None:
    """Return the match of a path with a template, or None; a last parameter may be missing."""
    missing = len(template) - len(segments)
    if missing not in (0, 1) or (missing and not template[-1].endswith("}")):
        return None
    mistakes, path = 0, ""
    for segment, part in zip(segments, template, strict=False):
        likely = _likely_segment(segment, part)
        if not likely:
            return None
        mistakes += likely != segment
        path += "/" + quote(likely, safe=":")
    return Match(
        mistakes + missing, f"{path}/{template[-1].strip('{}').upper()}" if missing else path
    )


@lru_cache(maxsize=1024)
def _likely_segment(segment: str, part: str) -> str:
    """Return the likely spelling of a segment for a part of a template, or an empty string."""
    if not part.startswith("{"):
        return segment if segment == part else nearest(segment.lower(), [part])
    verb = part.partition("}")[2]  # `{model}:predict`
    if not verb or segment.endswith(verb):
        return segment
    name, colon, typed_verb = segment.rpartition(":")
    return f"{name}{verb}" if colon and nearest(typed_verb.lower(), [verb[1:]]) else ""
