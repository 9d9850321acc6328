"""Chooses the version that answers a request: pure functions of the table, the request, and a
random number.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple, TypeVar

from tsx_runtime.core.scheduling.job import Headers
from tsx_runtime.errors import ModelVersionNotFound
from tsx_runtime.settings.traffic_policy import Pattern, Rule, Traffic, compile_pattern
from tsx_runtime.wire import MAX_COPIED_BYTES, Body, Parts

MOST_TRIED = 8  # headers of one name that a rule is tried on
MOST_COOKIES = (
    200  # of one header, among which a sticky one is looked for: browsers keep fewer for a site
)
# bytes of a header's value that a pattern is tried on: what clients send must not keep the server
# busy
LONGEST = 1024

VersionT = TypeVar("VersionT")


def choose(
    name: str,
    versions: Mapping[str, VersionT],
    default: str,
    wanted: str | None,
    labels: Mapping[str, str] | None = None,
) -> VersionT:
    """The version that is asked for by its number or by a label, or the default one."""
    version = versions.get(default if wanted is None else wanted)
    if version is not None:
        return version
    text = f"Model version: {wanted} does not exist for model: {name}"
    if wanted is not None and labels and (number := labels.get(wanted)) is not None:
        if number in versions:
            return versions[number]
        text = (
            f"Model version: {number} does not exist for model: {name}, and the label {wanted}"
            " means it"
        )
    raise ModelVersionNotFound(text)


class CompiledRule(NamedTuple):
    """A rule whose version is ready."""

    header: bytes
    equals: bytes | None
    matches: Pattern | None
    version: str


@dataclass(frozen=True)
class Table:
    """The versions that answer requests without a version: the ready ones, or the default if none
    is ready.
    """

    model: str
    default: str
    versions: tuple[str, ...] = ()  # those with a weight
    weights: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()  # running sums of the weights
    fits: tuple[CompiledRule, ...] = ()
    by: str = (
        ""  # what makes a request pick_sticky: header, cookie or field; empty where nothing does
    )
    key: str = ""  # the name of that

    def shares(self) -> dict[str, float]:
        """Of the requests that no rule sends anywhere, by version."""
        if not self.versions:
            return {self.default: 1.0}
        return {
            version: weight / self.bounds[-1]
            for version, weight in zip(self.versions, self.weights, strict=True)
        }


def make_table(
    model: str, traffic: Traffic, registered: Collection[str], ready: Collection[str], default: str
) -> Table:
    """Of what `traffic` names, versions that are not ready are left out; two names of one version
    share its weight.
    """
    weights: dict[str, float] = {}
    for word, weight in traffic.weights.items():
        number = resolve_label(word, registered, traffic.labels)
        if number in ready and weight > 0:
            weights[number] = weights.get(number, 0.0) + weight
    fits = [
        _fit(rule, number)
        for rule in traffic.rules
        if (number := resolve_label(rule.to, registered, traffic.labels)) in ready
    ]
    by, _, key = (
        (traffic.sticky or "").partition(":") if len(weights) > 1 else ("", "", "")
    )  # else there is nothing to choose
    bounds = tuple(accumulate(weights.values()))
    return Table(
        model,
        default,
        tuple(weights),
        tuple(weights.values()),
        bounds,
        tuple(fits),
        by,
        key.lower() if by == "header" else key,
    )


def resolve_label(word: str, registered: Collection[str], labels: Mapping[str, str]) -> str:
    """The version that a word means: itself where it is one, else what the label of that name
    says.
    """
    return word if word in registered else labels.get(word, word)


def unknown_versions(traffic: Traffic, registered: Collection[str]) -> set[str]:
    """The versions and labels that the policy names and that lead to no registered version."""
    return {
        word
        for word in traffic.targets
        if resolve_label(word, registered, traffic.labels) not in registered
    }


def serving_versions(traffic: Traffic, registered: Collection[str], default: str) -> set[str]:
    """The versions that requests which name none are to go to, of those that are registered, ready
    or not.
    """
    ruled = {resolve_label(rule.to, registered, traffic.labels) for rule in traffic.rules}
    return weighted_versions(traffic, registered, default) | ruled.intersection(registered)


def weighted_versions(traffic: Traffic, registered: Collection[str], default: str) -> set[str]:
    """Those of them that no rule names."""
    weighted = {
        resolve_label(word, registered, traffic.labels)
        for word, weight in traffic.weights.items()
        if weight > 0
    }
    return weighted.intersection(registered) or {default}


def by_rule(table: Table, headers: Headers) -> str | None:
    """The version of the first rule that fits."""
    if not table.fits:
        return None
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    for fit in table.fits:
        for value in values.get(fit.header, ())[:MOST_TRIED]:
            if _fits(fit, value.strip()):
                return fit.version
    return None


def key_in_head(table: Table, headers: Headers) -> bytes | None:
    """What makes the request pick_sticky to a version, where a header or a cookie does; None where
    the request has none.
    """
    if table.by == "header":
        name = table.key.encode()
        return next(
            (value.strip() for other, value in headers if other == name and value.strip()), None
        )
    if table.by == "cookie":
        return _cookie(table.key.encode(), headers)
    return None


def key_in_body(table: Table, body: Body) -> bytes | None:
    """The same, of a field of a JSON body.

    A large one is not parsed: that would block the event loop.
    """
    if (
        table.by != "field"
        or isinstance(body, Parts)
        or len(body) > MAX_COPIED_BYTES
        or bytes(body[:16]).lstrip()[:1] not in (b"{", b"[")
    ):
        return None
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError):
        return None
    for part in table.key.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    if value is None or isinstance(value, dict | list):
        return None
    return str(value).encode("utf-8", "surrogatepass")


def draw(table: Table, point: float) -> str:
    """By weight. `point` is random, from 0 up to but not including 1."""
    versions = table.versions
    if len(versions) < 2:
        return versions[0] if versions else table.default
    return versions[min(bisect_right(table.bounds, point * table.bounds[-1]), len(versions) - 1)]


def pick_sticky(table: Table, key: bytes) -> str:
    """By weight, and always the same for a key: weighted rendezvous hashing.

    Each version draws a lot for the key, and its weight lifts it; the highest wins. A change of one
    version's weight moves only lots of that version, so no key goes from one of the others to
    another of them.
    """
    if len(table.versions) < 2:
        return draw(table, 0.0)
    lots = [
        _lot(table.model, version, key, weight)
        for version, weight in zip(table.versions, table.weights, strict=True)
    ]
    return table.versions[lots.index(max(lots))]


def _lot(model: str, version: str, key: bytes, weight: float) -> float:
    digest = blake2b(
        b"%b\0%b\0%b" % (model.encode(), version.encode(), key), digest_size=8
    ).digest()
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / (1 << 52)  # neither 0 nor 1
    return -weight / math.log(uniform)


def _fit(rule: Rule, version: str) -> CompiledRule:
    equals = None if rule.equals is None else rule.equals.strip().encode()
    return CompiledRule(
        rule.header.lower().encode(),
        equals,
        None if rule.matches is None else compile_pattern(rule.matches),
        version,
    )


def _fits(fit: CompiledRule, value: bytes) -> bool:
    if fit.matches is None:
        return value == fit.equals
    return (
        len(value) <= LONGEST
        and fit.matches.fullmatch(value.decode("utf-8", "replace")) is not None
    )


def _cookie(name: bytes, headers: Headers) -> bytes | None:
    for other, value in headers:
        if other == b"cookie":
            for crumb in value.split(b";", MOST_COOKIES)[:MOST_COOKIES]:
                key, equals, text = crumb.strip().partition(b"=")
                text = text.strip().strip(b'"')
                if equals and key.strip() == name and text:
                    return text
    return None
