"""The choice of the version for a request: pure functions of table, request and random number."""

from __future__ import annotations

import json
import math
import re
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

MAX_HEADERS_PER_NAME = 8  # headers with the same name that are compared with a rule
MAX_COOKIES = 200  # cookies that are searched in a header; browsers keep fewer per site
# Longer values never match a pattern, so that a client cannot keep the server busy.
MAX_MATCHED_BYTES = 1024

VersionT = TypeVar("VersionT")


def choose_version(
    name: str,
    versions: Mapping[str, VersionT],
    default: str,
    requested: str | None,
    labels: Mapping[str, str] | None = None,
) -> VersionT:
    """Return the version with this number or label, or the default version.

    Raises:
        ModelVersionNotFound: There is no such version.
    """
    version = versions.get(default if requested is None else requested)
    if version is not None:
        return version
    text = f"Model version: {requested} does not exist for model: {name}"
    if requested is not None and labels and (number := labels.get(requested)) is not None:
        if number in versions:
            return versions[number]
        text = (
            f"Model version: {number} does not exist for model: {name}, and the label {requested}"
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
    """The versions for requests without a version: the ready ones, or else the default one."""

    model: str
    default: str
    versions: tuple[str, ...] = ()  # versions that have a weight
    weights: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()  # running sums of the weights
    rules: tuple[CompiledRule, ...] = ()
    # The part of a request that assigns it to a version: header, cookie or field; empty for none.
    by: str = ""
    key: str = ""  # the name of that header, cookie or field

    def shares(self) -> dict[str, float]:
        """Return the fraction of requests without a matching rule for each version."""
        if not self.versions:
            return {self.default: 1.0}
        return {
            version: weight / self.bounds[-1]
            for version, weight in zip(self.versions, self.weights, strict=True)
        }


def make_table(
    model: str, traffic: Traffic, registered: Collection[str], ready: Collection[str], default: str
) -> Table:
    """Build the table of a traffic, without versions that are not ready.

    If a version has a weight by its number and by its label, they are added.
    """
    weights: dict[str, float] = {}
    for name, weight in traffic.weights.items():
        version = resolve_label(name, registered, traffic.labels)
        if version in ready and weight > 0:
            weights[version] = weights.get(version, 0.0) + weight
    rules = [
        _compile_rule(rule, version)
        for rule in traffic.rules
        if (version := resolve_label(rule.to, registered, traffic.labels)) in ready
    ]
    # If only one version has a weight, there is nothing to choose.
    by, _, key = (traffic.sticky or "").partition(":") if len(weights) > 1 else ("", "", "")
    bounds = tuple(accumulate(weights.values()))
    return Table(
        model,
        default,
        tuple(weights),
        tuple(weights.values()),
        bounds,
        tuple(rules),
        by,
        key.lower() if by == "header" else key,
    )


def resolve_label(name: str, registered: Collection[str], labels: Mapping[str, str]) -> str:
    """Return the version for a name: the registered version, or else the label's version."""
    return name if name in registered else labels.get(name, name)


def unknown_versions(traffic: Traffic, registered: Collection[str]) -> set[str]:
    """Return the names of versions and labels without a registered version."""
    return {
        name
        for name in traffic.targets
        if resolve_label(name, registered, traffic.labels) not in registered
    }


def serving_versions(traffic: Traffic, registered: Collection[str], default: str) -> set[str]:
    """Return the registered versions, ready or not, that may serve requests without a version."""
    rule_versions = {resolve_label(rule.to, registered, traffic.labels) for rule in traffic.rules}
    return weighted_versions(traffic, registered, default) | rule_versions.intersection(registered)


def weighted_versions(traffic: Traffic, registered: Collection[str], default: str) -> set[str]:
    """Return the registered versions that serve requests without a version or a matching rule."""
    versions = {
        resolve_label(name, registered, traffic.labels)
        for name, weight in traffic.weights.items()
        if weight > 0
    }
    return versions.intersection(registered) or {default}


def version_by_rule(table: Table, headers: Headers) -> str | None:
    """Return the version of the first matching rule, or None."""
    if not table.rules:
        return None
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    for rule in table.rules:
        for value in values.get(rule.header, ())[:MAX_HEADERS_PER_NAME]:
            if _matches(rule, value.strip()):
                return rule.version
    return None


def key_in_head(table: Table, headers: Headers) -> bytes | None:
    """Return the value of the header or cookie that assigns a request to a version, or None."""
    if table.by == "header":
        name = table.key.encode()
        return next(
            (value.strip() for header, value in headers if header == name and value.strip()), None
        )
    if table.by == "cookie":
        return _cookie(table.key.encode(), headers)
    return None


def key_in_body(table: Table, body: Body) -> bytes | None:
    """Return the value of the JSON body's field that assigns a request to a version, or None.

    A large body is not parsed, because that would block the event loop.
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
    """Return a random version by weight; `point` is random in [0, 1)."""
    versions = table.versions
    if len(versions) < 2:
        return versions[0] if versions else table.default
    return versions[min(bisect_right(table.bounds, point * table.bounds[-1]), len(versions) - 1)]


def pick_sticky(table: Table, key: bytes) -> str:
    """Return a version by weight that is always the same for a key, by weighted rendezvous hashing.

    Each version gets a score for the key, which grows with its weight, and the highest one wins. If
    one weight changes, only keys from or to that version move.
    """
    if len(table.versions) < 2:
        return draw(table, 0.0)
    scores = [
        _score(table.model, version, key, weight)
        for version, weight in zip(table.versions, table.weights, strict=True)
    ]
    return table.versions[scores.index(max(scores))]


def _score(model: str, version: str, key: bytes, weight: float) -> float:
    digest = blake2b(
        b"%b\0%b\0%b" % (model.encode(), version.encode(), key), digest_size=8
    ).digest()
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / (1 << 52)  # neither 0 nor 1
    return -weight / math.log(uniform)


def _compile_rule(rule: Rule, version: str) -> CompiledRule:
    equals = None if rule.equals is None else rule.equals.strip().encode()
    return CompiledRule(
        rule.header.lower().encode(),
        equals,
        None if rule.matches is None else compile_pattern(rule.matches),
        version,
    )


def _matches(rule: CompiledRule, value: bytes) -> bool:
    if rule.matches is None:
        return value == rule.equals
    return (
        len(value) <= MAX_MATCHED_BYTES
        and rule.matches.fullmatch(value.decode("utf-8", "replace")) is not None
    )


def _cookie(name: bytes, headers: Headers) -> bytes | None:
    for header, value in headers:
        if header == b"cookie":
            for pair in value.split(b";", MAX_COOKIES)[:MAX_COOKIES]:
                key, equals, text = pair.strip().partition(b"=")
                text = text.strip().strip(b'"')
                if equals and key.strip() == name and text:
                    return text
    return None


def version_sort_key(number: str) -> list[int | str]:
    """Return the sort key of a version's number, so that 9 comes before 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", number)]
