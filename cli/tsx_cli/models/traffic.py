"""`tsx models traffic`, `label` and `rollback`: how a model's requests are split among its versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tsx_cli.common.client import path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import AsJson, Config, ModelName, Url, management
from tsx_cli.common.output import one_line, print_json, print_table

RULE = re.compile(r"header\s+(?P<header>[^\s=~]+)\s*(?P<sign>[=~])\s*(?P<value>.*?)\s*->\s*(?P<to>\S+)")


def traffic(
    name: ModelName,
    weights: Annotated[
        list[str] | None, typer.Argument(metavar="[VERSION=WEIGHT]...", help="Percentages by version or label, such as 1.0=90 2.0=10.")
    ] = None,
    sticky: Annotated[
        str | None, typer.Option(help="What makes a client keep its version: header:NAME, cookie:NAME, field:NAME; or none.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="'header X-Beta=1 -> VERSION', or with ~ for a pattern; instead of the current rules.")
    ] = None,
    no_rules: Annotated[bool, typer.Option("--no-rules", help="Remove the rules.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Send all requests to the default version; labels stay.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    config: Config = None,
) -> None:
    """Show or change how a model's requests are split among its versions; what is not given stays unchanged."""
    server, target = management(url, config), path("models", name, "traffic")
    wanted = [bool(weights), sticky is not None, bool(rule), no_rules]
    if clear and any(wanted):
        raise UsageError("--clear removes the traffic policy; use it without other options")
    if rule and no_rules:
        raise UsageError("--rule sets the rules and --no-rules removes them; use only one of them")
    if clear:
        answer = server.call("DELETE", target).json()
    elif any(wanted):
        changes: dict[str, Any] = {}  # only what is named: another client, or a rollout, may change the rest meanwhile
        if sticky is not None:
            changes["sticky"] = None if sticky == "none" else sticky
        if rule or no_rules:
            changes["rules"] = [_rule(text) for text in rule or []]
        if weights:
            named = _weights(weights)
            there = server.call("GET", target).json()["traffic"].get("weights", {})
            changes["weights"] = dict.fromkeys(there) | named
        answer = server.call_json("PATCH", target, changes)
    else:
        answer = server.call("GET", target).json()
    _show(answer, as_json)


def label(
    name: ModelName,
    labels: Annotated[list[str] | None, typer.Argument(metavar="[LABEL=VERSION]...", help="Such as stable=1.0 canary=2.0.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove this label.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    config: Config = None,
) -> None:
    """Give versions labels, which URLs can use in place of version numbers; without arguments, list the labels."""
    server, target = management(url, config), path("models", name, "traffic")
    given = [_label(text) for text in labels or []]
    words = [*(word for word, _ in given), *(remove or [])]
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise UsageError(f"the label '{twice}' is named twice; name it once")
    answer = server.call("GET", target).json()
    there = answer["traffic"].get("labels", {})
    gone = next((word for word in remove or [] if word not in there), None)
    if gone is not None:
        raise CliError(f"model {name} has no label '{gone}'; it has {', '.join(there) or 'none'}")
    if words:
        answer = server.call_json("PATCH", target, {"labels": dict(given) | dict.fromkeys(remove or [])})
    if as_json:
        print_json(answer["traffic"].get("labels", {}))
        return
    rows = sorted(answer["traffic"].get("labels", {}).items())
    if rows:
        ready = {share["version"]: share["ready"] for share in answer["table"]}
        print_table(["label", "version", "ready"], [(word, version, _yes(ready.get(version, False))) for word, version in rows])
    else:
        print(f"model {name} has no labels; `tsx models label {name} stable={answer['default']}` gives one")


def rollback(name: ModelName, as_json: AsJson = False, url: Url = None, config: Config = None) -> None:
    """Undo the last change of a model's traffic, labels or default version; a second rollback restores it."""
    _show(management(url, config).call("POST", path("models", name, "rollback")).json(), as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            share["version"] + (" (default)" if share["version"] == answer["default"] else ""),
            ", ".join(share["labels"]),
            _yes(share["ready"]) if share["registered"] else "not registered",
            f"{100 * share['share']:.4g} %",
            share["requests"],
            share["errors"],
        )
        for share in answer["table"]
    ]
    print_table([answer["model"], "labels", "ready", "share", "requests", "errors"], rows)
    said = answer["traffic"]
    if said.get("sticky"):
        print(f"sticky by {one_line(said['sticky'].replace(':', ' ', 1))}")
    for rule in said.get("rules", []):
        test = f"={rule['equals']}" if "equals" in rule else f"~{rule['matches']}"
        print(f"rule: header {rule['header']}{one_line(test)} -> {rule['to']}")


def _weights(texts: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for text in texts:
        version, _, weight = text.rpartition("=")
        number = 0.0
        try:
            number = int(weight) if weight.isdecimal() else float(weight)
        except ValueError:
            version = ""
        if not version:
            raise UsageError(f"`tsx models traffic` takes VERSION=WEIGHT, such as 2.0=10, not '{text}'")
        if version in weights:
            raise UsageError(f"'{version}' has two weights; give one")
        weights[version] = number
    return weights


def _rule(text: str) -> dict[str, str]:
    found = RULE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"a rule has the form 'header X-Beta=1 -> 2.0', or 'header X-User~test-.* -> 2.0' for a pattern, not '{text}'")
    return {"header": found["header"], "equals" if found["sign"] == "=" else "matches": found["value"], "to": found["to"]}


def _label(text: str) -> tuple[str, str]:
    label, _, version = text.partition("=")
    if not label or not version:
        raise UsageError(f"`tsx models label` takes LABEL=VERSION, such as stable=1.0, not '{text}'")
    return label, version


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
