"""Loads the plugins that the setting `plugins` names: entry points of installed packages."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tsx_runtime.errors import SettingError
from tsx_runtime.plugins.api import (
    Authenticate,
    BatchPolicy,
    Comparison,
    Endpoint,
    MetricsSink,
    Source,
    Waiting,
)
from tsx_runtime.shared.suggestions import suggestion

logger = logging.getLogger("tsx.plugins")

GROUPS = (
    "endpoints",
    "authentication",
    "batch_policies",
    "metrics_sinks",
    "sources",
    "comparisons",
)
OWN_SCHEMES = ("http", "https", "s3", "file")
OWN_POLICIES = ("wait",)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclass(frozen=True)
class Plugins:
    """By the names of their entry points; one name may stand in several groups."""

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    authentication: Mapping[str, Authenticate] = field(default_factory=dict)
    batch_policies: Mapping[str, BatchPolicy] = field(default_factory=dict)
    metrics_sinks: Mapping[str, MetricsSink] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)


def load_plugins(names: Iterable[str]) -> Plugins:
    """Imports what the names stand for, and nothing else. Raises SettingError."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return Plugins()
    found: dict[str, dict[str, EntryPoint]] = {group: {} for group in GROUPS}
    for group, points in found.items():
        for point in entry_points(group=f"tsx.{group}"):
            if points.setdefault(point.name, point) != point and point.name in wanted:
                packages = " and ".join(
                    str(entry.dist and entry.dist.name) for entry in (points[point.name], point)
                )
                raise SettingError(
                    f"the plugin '{point.name}' is in two packages, {packages}; uninstall one of"
                    " them"
                )
    known = sorted({name for points in found.values() for name in points})
    for name in wanted:
        if name not in known:
            installed = (
                f"installed are: {', '.join(known)}"
                if known
                else "no installed package provides any"
            )
            raise SettingError(
                f"there is no plugin '{name}'{suggestion(name, known) or f'; {installed}'}"
            )
    loaded = {
        group: {name: _load(group, points[name]) for name in wanted if name in points}
        for group, points in found.items()
    }
    for name in loaded["sources"]:
        _check_new(name, "source", OWN_SCHEMES, _SCHEME)
    for name in loaded["batch_policies"]:
        _check_new(name, "batch policy", OWN_POLICIES)
    loaded["batch_policies"] = {
        name: _careful(name, policy) for name, policy in loaded["batch_policies"].items()
    }
    return Plugins(**loaded)


def _load(group: str, point: EntryPoint) -> Any:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:  # the boundary to the plugin's code
        raise SettingError(
            f"the plugin '{point.name}' does not load: {point.value}: {type(error).__name__}:"
            f" {error}"
        ) from error
    if group == "endpoints":
        if not (
            isinstance(plugin, Endpoint) and re.fullmatch(r"(/[A-Za-z0-9_.~-]+)+", plugin.path)
        ):
            raise SettingError(
                f"the plugin '{point.name}' ({point.value}) is not an Endpoint with a path such as"
                " /a/path"
            )
    elif not callable(plugin):
        raise SettingError(
            f"the plugin '{point.name}' ({point.value}) is a {type(plugin).__name__}, not a"
            " function"
        )
    return plugin if group == "endpoints" else _staying(point.name, plugin)


def _staying(name: str, plugin: Callable[..., Any]) -> Callable[..., Any]:
    """Make an exit of the plugin an error: on the event loop it would end the server."""

    @functools.wraps(plugin)
    def call(*args: Any) -> Any:
        try:
            return plugin(*args)
        except SystemExit as error:
            raise RuntimeError(f"the plugin '{name}' called sys.exit({error.code!r})") from error

    return call


def _careful(name: str, policy: BatchPolicy) -> BatchPolicy:
    """One that fails sends the batch now, and is logged once: no request waits for it."""
    logged = False

    def ask(waiting: Waiting) -> float:
        nonlocal logged
        try:
            return max(0.0, float(policy(waiting)))
        except Exception:  # the boundary to the plugin's code
            if not logged:
                logger.exception(
                    "the batch policy '%s' failed, so a batch is sent at once; later failures are"
                    " not logged",
                    name,
                )
            logged = True
            return 0.0

    return ask


def _check_new(
    name: str, what: str, own: tuple[str, ...], form: re.Pattern[str] | None = None
) -> None:
    if name in own or (form is not None and not form.fullmatch(name)):
        raise SettingError(
            f"the plugin '{name}' cannot be a {what}: that name is"
            f" {'taken' if name in own else 'no scheme of URLs'}"
        )
