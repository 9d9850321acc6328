"""`tsx models traffic`, `label` and `rollback` control how requests are split among versions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tsx_cli.common.client import Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson, Force, ModelName
from tsx_cli.common.output import one_line, print_json, print_table

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
]

RULE = re.compile(
    r"header\s+(?P<header>[^\s=~]+)\s*(?P<sign>[=~])\s*(?P<value>.*?)\s*->\s*(?P<to>\S+)"
)


@with_server
def traffic(
    server: Server,
    name: ModelName,
    weights: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VERSION=PERCENT]...",
            help="Shares by version or label, such as 2.0=10; the other versions split the rest.",
        ),
    ] = None,
    sticky: Annotated[
        str | None,
        typer.Option(
            help=(
                "What makes a client keep its version: header:NAME, cookie:NAME, field:NAME; or"
                " none."
            )
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "'header X-Beta=1 -> VERSION', or with ~ for a pattern; instead of the current"
                " rules."
            )
        ),
    ] = None,
    no_rules: Annotated[bool, typer.Option("--no-rules", help="Remove the rules.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Send all requests to the default version; labels stay.")
    ] = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Show or change how a model's requests are split among its versions.

    What is not given stays unchanged. Versions that are not named keep their proportions in what is
    left; if all are named, only the proportions of the numbers matter.
    """
    target = path("models", name, "traffic")
    change_path = path("models", name, "traffic", force=force or None, dry_run=dry_run or None)
    given_parts = [bool(weights), sticky is not None, bool(rule), no_rules]
    if clear and any(given_parts):
        raise UsageError("--clear removes the traffic policy; use it without other options")
    if rule and no_rules:
        raise UsageError("--rule sets the rules and --no-rules removes them; use only one of them")
    if clear:
        answer = server.call("DELETE", change_path).json()
    elif any(given_parts):
        # Only the given parts are sent, since another client or a rollout may change the others.
        changes: dict[str, Any] = {}
        if sticky is not None:
            changes["sticky"] = None if sticky == "none" else sticky
        if rule or no_rules:
            changes["rules"] = [_rule(text) for text in rule or []]
        if weights:
            changes["weights"] = with_shares(
                read_weights(weights), server.call("GET", target).json()
            )
        answer = server.call_json("PATCH", change_path, changes)
    else:
        answer = server.call("GET", target).json()
    _show(answer, as_json, dry_run=dry_run)


@with_server
def label(
    server: Server,
    name: ModelName,
    labels: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LABEL=VERSION]...", help="Such as stable=1.0 canary=2.0."),
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove this label.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Give versions labels, which URLs can use in place of version numbers.

    Without arguments, list the labels.
    """
    target = path("models", name, "traffic")
    pairs = [_label(text) for text in labels or []]
    names = [*(label for label, _ in pairs), *(remove or [])]
    repeated_label = next((label for label in names if names.count(label) > 1), None)
    if repeated_label is not None:
        raise UsageError(f"the label '{repeated_label}' is named twice; name it once")
    answer = server.call("GET", target).json()
    existing = answer["traffic"].get("labels", {})
    unknown_label = next((label for label in remove or [] if label not in existing), None)
    if unknown_label is not None:
        raise CliError(
            f"model {name} has no label '{unknown_label}'; it has {', '.join(existing) or 'none'}"
        )
    if names:
        answer = server.call_json(
            "PATCH",
            path("models", name, "traffic", force=force or None),
            {"labels": dict(pairs) | dict.fromkeys(remove or [])},
        )
    if as_json:
        print_json(answer["traffic"].get("labels", {}))
        return
    rows = sorted(answer["traffic"].get("labels", {}).items())
    if rows:
        ready = {share["version"]: share["ready"] for share in answer["table"]}
        print_table(
            ["label", "version", "ready"],
            [(label, version, _yes_or_no(ready.get(version, False))) for label, version in rows],
        )
    else:
        print(
            f"model {name} has no labels; `tsx models label {name} stable={answer['default']}`"
            " gives one"
        )


@with_server
def rollback(
    server: Server, name: ModelName, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Undo the last change of a model's traffic, labels or default version.

    The next rollback undoes the one before.
    """
    answer = server.call("POST", path("models", name, "rollback", dry_run=dry_run or None)).json()
    _show(answer, as_json, dry_run=dry_run)
    if as_json:
        return
    remaining = answer["undoable"] - dry_run
    remaining_text = f"; {remaining} more can be undone" if remaining else "; it was the first one"
    undone_text = (
        f"undone: the change of {answer['undone'][:19]}Z"
        if "undone" in answer
        else "the last change would be undone"
    )
    print(f"{undone_text}{remaining_text}")


def _show(answer: dict[str, Any], as_json: bool, *, dry_run: bool = False) -> None:
    if as_json:
        print_json(answer)
        return
    shows_changes = "changes" in answer
    rows = [
        (
            share["version"] + (" (default)" if share["version"] == answer["default"] else ""),
            ", ".join(share["labels"]),
            _yes_or_no(share["ready"]) if share["registered"] else "not registered",
            *([_percent(share["share_before"])] if shows_changes else []),
            _percent(share["share"]),
            share["requests"],
            share["errors"],
        )
        for share in answer["table"]
    ]
    print_table(
        [
            answer["model"],
            "labels",
            "ready",
            *(["before"] if shows_changes else []),
            "share",
            "requests",
            "errors",
        ],
        rows,
    )
    policy = answer["traffic"]
    if policy.get("sticky"):
        print(f"sticky by {one_line(policy['sticky'].replace(':', ' ', 1))}")
    for rule in policy.get("rules", []):
        test = f"={rule['equals']}" if "equals" in rule else f"~{rule['matches']}"
        print(f"rule: header {rule['header']}{one_line(test)} -> {rule['to']}")
    for change in answer.get("changes", []):
        print(
            f"{'would change' if dry_run else 'changed'}: {change['what']}:"
            f" {_value(change, 'before')} -> {_value(change, 'after')}"
        )
    if answer.get("changes") == []:
        print("nothing changes" if dry_run else "nothing was changed")


def with_shares(
    percentages: Mapping[str, float], answer: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return weights with percentages for the given versions; the others share the remainder.

    Args:
        percentages: The percentages by version or label.
        answer: The current traffic.

    Returns:
        The weights; None removes a weight.

    Raises:
        UsageError: The percentages leave nothing for some version, or are all 0.
    """
    labels = answer["traffic"].get("labels", {})
    weights = answer["traffic"].get("weights") or {answer["default"]: 100}
    given_versions = {labels.get(version, version) for version in percentages}
    remaining = {
        version: weight
        for version, weight in weights.items()
        if labels.get(version, version) not in given_versions and weight > 0
    }
    total = sum(percentages.values())
    if not remaining and total == 0:
        raise UsageError(
            "all shares are 0, which leaves no version for the requests; give one of them a share,"
            " or --clear"
        )
    if not remaining:
        return dict.fromkeys(weights) | dict(percentages)
    if total > 100:
        raise UsageError(
            f"the shares add up to {total:g} %: nothing is left for {', '.join(remaining)}; give smaller"
            " ones, or name all versions"
        )
    factor = (100 - total) / sum(remaining.values())
    return (
        dict.fromkeys(weights)
        | {version: _rounded_weight(weight * factor) for version, weight in remaining.items()}
        | dict(percentages)
    )


def read_weights(texts: Sequence[str]) -> dict[str, float]:
    """Parse VERSION=PERCENT arguments.

    Raises:
        UsageError: An argument is invalid.
    """
    weights: dict[str, float] = {}
    for text in texts:
        version, _, weight = text.rpartition("=")
        number = 0.0
        try:
            number = int(weight) if weight.isdecimal() else float(weight)
        except ValueError:
            version = ""
        if not version:
            raise UsageError(
                f"`tsx models traffic` takes VERSION=PERCENT, such as 2.0=10, not '{text}'"
            )
        if version in weights:
            raise UsageError(f"'{version}' has two shares; give one")
        weights[version] = number
    return weights


def _rule(text: str) -> dict[str, str]:
    match = RULE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            "a rule has the form 'header X-Beta=1 -> 2.0', or 'header X-User~test-.* -> 2.0' for a"
            f" pattern, not '{text}'"
        )
    return {
        "header": match["header"],
        "equals" if match["sign"] == "=" else "matches": match["value"],
        "to": match["to"],
    }


def _label(text: str) -> tuple[str, str]:
    label, _, version = text.partition("=")
    if not label or not version:
        raise UsageError(
            f"`tsx models label` takes LABEL=VERSION, such as stable=1.0, not '{text}'"
        )
    return label, version


def _rounded_weight(weight: float) -> float:
    return round(weight) if weight == round(weight) else round(weight, 6)


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _value(change: Mapping[str, Any], field: str) -> str:
    value = change.get(field, "none")
    return one_line(value if isinstance(value, str) else json.dumps(value))


def _yes_or_no(answer: bool) -> str:
    return "yes" if answer else "no"
