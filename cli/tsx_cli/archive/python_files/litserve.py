"""The arguments of LitServe's classes in a Python file, read without running it.

A file constructs `LitServer(MyAPI(max_batch_size=8), workers_per_device=2)`, usually under
`if __name__ == "__main__"`. This code does not run: the literals in it become settings.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_cli.common.failure import CliError

BASE, SERVER, DEFAULT_PATH = "LitAPI", "LitServer", "predict"
API_ARGUMENTS = ("max_batch_size", "batch_timeout", "api_path", "stream")
SERVER_ARGUMENTS = ("lit_api", "accelerator", "devices", "workers_per_device", "timeout")
DEFAULT_TIMEOUT_S, NO_TIMEOUT_S = 120, 86_400  # the default of responseTimeout, and a day


class LitServeFacts(NamedTuple):
    """What a file says about a LitServe class.

    Attributes:
        name: The last part of `api_path`; empty if it is LitServe's default.
        settings: The settings that arguments stand for, by their keys in model-config.yaml.
        attributes: The attributes that `LitServer` sets.
        is_async: Whether the methods are coroutines.
        unknown: The arguments of the class that are not literals.
        unused: The arguments of `LitServer` that are not used.
    """

    name: str
    settings: dict[str, Any]
    attributes: dict[str, Any]
    is_async: bool
    unknown: list[str]
    unused: list[str]


NOT_LITSERVE = LitServeFacts("", {}, {}, False, [], [])


def is_litserve(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Tell whether a class is derived from `LitAPI`, also by another class of the file."""
    names = set(map(_name, node.bases))
    parents = [classes[name] for name in names & set(classes) - {node.name}]
    return BASE in names or any(is_litserve(parent, classes) for parent in parents)


def read_litserve(source: ast.Module, node: ast.ClassDef) -> LitServeFacts:
    """Read the arguments for a class.

    Raises:
        CliError: The class is constructed twice, or an argument has a wrong type.
    """
    constructions = {ast.unparse(call): call for call in _calls(source, node.name)}
    if len(constructions) > 1:
        raise CliError(
            f"{node.name} is constructed as {' and as '.join(constructions)}; keep one, or derive"
            " a class for each"
        )
    names: Sequence[str] = API_ARGUMENTS
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            names = [argument.arg for argument in method.args.args[1:]]
    inherited, _ = _literals(_calls(node, "__init__"), API_ARGUMENTS)
    arguments, unknown = _literals(constructions.values(), names)
    server, unused = _literals(_calls(source, SERVER), SERVER_ARGUMENTS)
    attributes = {name: server.pop(name) for name in API_ARGUMENTS if name in server}
    facts = inherited | arguments | attributes
    if isinstance(server.get("workers_per_device"), dict | list):
        unused.append("workers_per_device")  # It has a number for each API.
        del server["workers_per_device"]
    try:
        settings = _settings(facts, server)
    except TypeError as error:
        raise CliError(
            f"{node.name} or {SERVER} has an argument of a wrong type: {error}"
        ) from error
    unused += [name for name in server if name not in SERVER_ARGUMENTS]
    if "timeout" in server:
        attributes["request_timeout"] = server["timeout"]
    path = str(facts.get("api_path", "")).rstrip("/").rpartition("/")[2]
    return LitServeFacts(
        "" if path == DEFAULT_PATH else path,
        settings | ({"init_args": arguments} if arguments else {}),
        attributes,
        facts.get("enable_async") is True,
        unknown,
        [name for name in unused if name != SERVER_ARGUMENTS[0]],
    )


def _settings(api: Mapping[str, Any], server: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if api.get("max_batch_size", 1) != 1:
        settings["batchSize"] = api["max_batch_size"]
        if delay_s := api.get("batch_timeout"):
            settings |= {"batchPolicy": "wait", "maxBatchDelay": math.ceil(delay_s * 1000)}
    workers, devices = server.get("workers_per_device", 1), server.get("devices", "auto")
    accelerator = server.get("accelerator") or "auto"
    if accelerator != "auto":
        settings["deviceType"] = accelerator
    if accelerator in ("cuda", "gpu") and devices != "auto":
        settings["deviceIds"] = devices if isinstance(devices, list) else list(range(devices))
        workers *= len(settings["deviceIds"])
    if workers != 1:
        settings |= {"minWorkers": workers, "maxWorkers": workers}
    timeout = server.get("timeout", 0)
    timeout = NO_TIMEOUT_S if timeout is False or timeout < 0 else timeout
    if timeout > DEFAULT_TIMEOUT_S:
        settings["responseTimeout"] = math.ceil(timeout)
    return settings


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == name
    ]


def _literals(calls: Iterable[ast.Call], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of calls that are literals, and the names of the others."""
    values, unknown = {}, []
    for call in calls:
        positional = zip(names, call.args, strict=False)
        for name, node in [*positional, *((item.arg, item.value) for item in call.keywords)]:
            try:
                values[name or ""] = ast.literal_eval(node)
            except (ValueError, TypeError):
                unknown.append(name or ast.unparse(node))
    return values, unknown


def _name(node: ast.AST) -> str:
    """Return the last part of a name such as `litserve.LitAPI`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
