"""Says in a 404 which path the client most likely meant, or at which other address it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from tsx_runtime.api.errors import NOT_FOUND
from tsx_runtime.errors import ResourceNotFound
from tsx_runtime.shared.suggestions import nearest

LONGEST = 200  # characters of a path that is compared
INDEX = "GET / lists the paths of this address."


class Match(NamedTuple):
    slips: int  # words that differ
    path: str


class LikelyPaths:
    """Of one listener. Paths are templates as in OpenAPI: `/models/{model}`."""

    def __init__(
        self, own: Iterable[str] = (), elsewhere: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        """`elsewhere`: the paths of other listeners, by their address in words."""
        self._own = _split(own)
        self._elsewhere = {where: _split(paths) for where, paths in (elsewhere or {}).items()}

    def not_found(self, path: str) -> ResourceNotFound:
        """`path` is percent-decoded."""
        hint = INDEX
        if len(path) <= LONGEST:
            words = path.strip("/").split("/")
            found = _best(words, self._own)
            where = next(
                (
                    where
                    for where, own in self._elsewhere.items()
                    if (there := _best(words, own)) and not there.slips
                ),
                "",
            )
            if where and (found is None or found.slips):
                hint = f"It is on {where}."
            elif found is not None:
                hint = f"Did you mean {found.path}?"
        return ResourceNotFound(f"{NOT_FOUND} {hint}")


def _split(paths: Iterable[str]) -> list[list[str]]:
    return [path.strip("/").split("/") for path in dict.fromkeys(paths)]


def _best(words: list[str], templates: list[list[str]]) -> Match | None:
    return min(
        filter(None, (_match(words, template) for template in templates)),
        key=lambda found: found.slips,
        default=None,
    )


def _match(words: list[str], template: list[str]) -> Match | None:
    """None where it is another path. At its end, one name may be missing."""
    missing = len(template) - len(words)
    if missing not in (0, 1) or (missing and not template[-1].endswith("}")):
        return None
    slips, path = 0, ""
    for word, part in zip(words, template, strict=False):
        meant = _meant(word, part)
        if not meant:
            return None
        slips += meant != word
        path += "/" + quote(meant, safe=":")
    return Match(slips + missing, f"{path}/{template[-1].strip('{}').upper()}" if missing else path)


@lru_cache(maxsize=1024)
def _meant(word: str, part: str) -> str:
    """The word for this part of a template: itself, the nearest, or nothing."""
    if not part.startswith("{"):
        return word if word == part else nearest(word.lower(), [part])
    verb = part.partition("}")[2]  # `{model}:predict`
    if not verb or word.endswith(verb):
        return word
    name, colon, own = word.rpartition(":")
    return f"{name}{verb}" if colon and nearest(own.lower(), [verb[1:]]) else ""
