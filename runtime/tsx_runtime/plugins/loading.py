"""Loads the plugins that the setting `plugins` names from entry points."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tsx_runtime.errors import SettingError
from tsx_runtime.feature import Feature
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
    "features",
)
BUILTIN_SCHEMES = ("http", "https", "s3", "file")
BUILTIN_POLICIES = ("wait",)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclass(frozen=True)
class Plugins:
    """The loaded plugins of each group by name; plugins of two groups may have the same name."""

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    authentication: Mapping[str, Authenticate] = field(default_factory=dict)
    batch_policies: Mapping[str, BatchPolicy] = field(default_factory=dict)
    metrics_sinks: Mapping[str, MetricsSink] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    features: Mapping[str, type[Feature]] = field(default_factory=dict)


def load_plugins(names: Iterable[str]) -> Plugins:
    """Import the plugins with these names, and no others.

    Raises:
        SettingError: A plugin is missing, ambiguous, or does not load.
    """
    wanted_names = list(dict.fromkeys(names))
    if not wanted_names:
        return Plugins()
    installed: dict[str, dict[str, EntryPoint]] = {group: {} for group in GROUPS}
    for group, points in installed.items():
        for point in entry_points(group=f"tsx.{group}"):
            if points.setdefault(point.name, point) != point and point.name in wanted_names:
                packages = " and ".join(
                    str(entry.dist and entry.dist.name) for entry in (points[point.name], point)
                )
                raise SettingError(
                    f"the plugin '{point.name}' is in two packages, {packages}; uninstall one of"
                    " them"
                )
    installed_names = sorted({name for points in installed.values() for name in points})
    for name in wanted_names:
        if name not in installed_names:
            hint = (
                f"installed are: {', '.join(installed_names)}"
                if installed_names
                else "no installed package provides any"
            )
            raise SettingError(
                f"there is no plugin '{name}'{suggestion(name, installed_names) or f'; {hint}'}"
            )
    plugins = {
        group: {name: _load(group, points[name]) for name in wanted_names if name in points}
        for group, points in installed.items()
    }
    for name in plugins["sources"]:
        _check_name(name, "source", BUILTIN_SCHEMES, _SCHEME)
    for name in plugins["batch_policies"]:
        _check_name(name, "batch policy", BUILTIN_POLICIES)
    plugins["batch_policies"] = {
        name: _with_fallback(name, policy) for name, policy in plugins["batch_policies"].items()
    }
    return Plugins(**plugins)


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
    elif group == "features":
        if not (isinstance(plugin, type) and issubclass(plugin, Feature)):
            raise SettingError(
                f"the plugin '{point.name}' ({point.value}) is not a subclass of"
                " tsx_runtime.feature.Feature"
            )
    elif not callable(plugin):
        raise SettingError(
            f"the plugin '{point.name}' ({point.value}) is a {type(plugin).__name__}, not a"
            " function"
        )
    return plugin if group in ("endpoints", "features") else _without_exit(point.name, plugin)


def _without_exit(name: str, plugin: Callable[..., Any]) -> Callable[..., Any]:
    """Turn SystemExit of a plugin into an error, since SystemExit would end the server."""

    @functools.wraps(plugin)
    def call(*args: Any) -> Any:
        try:
            return plugin(*args)
        except SystemExit as error:
            raise RuntimeError(f"the plugin '{name}' called sys.exit({error.code!r})") from error

    return call


def _with_fallback(name: str, policy: BatchPolicy) -> BatchPolicy:
    """Wrap a policy: if it fails, the batch is sent at once; only the first failure is logged."""
    is_logged = False

    def call_policy(waiting: Waiting) -> float:
        nonlocal is_logged
        try:
            return max(0.0, float(policy(waiting)))
        except Exception:  # the boundary to the plugin's code
            if not is_logged:
                logger.exception(
                    "the batch policy '%s' failed, so a batch is sent at once; later failures are"
                    " not logged",
                    name,
                )
            is_logged = True
            return 0.0

    return call_policy


def _check_name(
    name: str, kind: str, builtin: tuple[str, ...], pattern: re.Pattern[str] | None = None
) -> None:
    if name in builtin or (pattern is not None and not pattern.fullmatch(name)):
        raise SettingError(
            f"the plugin '{name}' cannot be a {kind}: that name is"
            f" {'taken' if name in builtin else 'no scheme of URLs'}"
        )
