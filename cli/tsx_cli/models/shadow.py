"""`tsx models shadow` copies a fraction of a model's requests to another version."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tsx_archiver.quantities import parse_percent
from tsx_cli.common.client import Server, path
from tsx_cli.common.compare_option import Ignore, comparison_text, read_compare
from tsx_cli.common.failure import UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson, Force, ModelName, read_option
from tsx_cli.common.output import one_line, print_result, print_table

MAX_BODY_CHARS = 100


@with_server
def shadow(
    server: Server,
    name: ModelName,
    to: Annotated[
        str | None, typer.Option("--version", help="Version or label that gets the copies.")
    ] = None,
    share: Annotated[str | None, typer.Option(help="Share of the requests, such as 10%.")] = None,
    comparison: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="HOW",
            help=(
                "numeric[:rtol=1e-3,atol=1e-6] (default), exact, top-k[:k=5] or"
                " plugin:NAME[,timeout=1]."
            ),
        ),
    ] = None,
    ignore: Ignore = None,
    examples: Annotated[int, typer.Option(min=0, help="Number of differing answers to show.")] = 3,
    off: Annotated[
        bool, typer.Option("--off", help="Stop copying requests; the results so far stay readable.")
    ] = False,
    force: Force = False,
    reset: Annotated[bool, typer.Option("--reset", help="Reset the counters.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the results of a model's shadow, start one, or change it.

    What is not given stays unchanged.
    """
    target = path("models", name, "shadow")
    has_changes = to is not None or share is not None or comparison is not None or bool(ignore)
    if off and (has_changes or reset):
        raise UsageError("--off ends the shadow; use it without other options")
    answer: dict[str, Any] = server.call("GET", target).json()
    if off:
        server.call_json("PATCH", path("models", name, "traffic"), {"shadow": None})
        answer = server.call("GET", target).json()
    if has_changes:
        answer = server.call_json(
            "PUT",
            path("models", name, "shadow", force=force or None),
            _changed_shadow(answer, name, to, share, comparison, ignore),
        )
    if reset:
        answer = server.call("DELETE", target).json()
    print_result(answer, as_json, partial(_show, examples))


def _changed_shadow(
    answer: dict[str, Any],
    name: str,
    to: str | None,
    share: str | None,
    comparison: str | None,
    ignore: list[str] | None,
) -> dict[str, Any]:
    """Return the shadow, changed by the options."""
    fields: dict[str, Any] = dict(answer.get("shadow", {}))
    if to is not None:
        fields["to"] = to
    if share is not None:
        fields["share"] = read_option(parse_percent, share, "--share", "a percentage such as 10%")
    if comparison is not None:
        fields["compare"] = read_compare(comparison)
    if ignore:
        fields["compare"] = fields.get("compare", {}) | {"ignore": ignore}
    if "to" not in fields or "share" not in fields:
        raise UsageError(
            f"a shadow takes a version and a share: `tsx models shadow {name} --version 2.0 --share"
            " 10%`"
        )
    return fields


def _show(examples: int, answer: dict[str, Any]) -> None:
    name = answer["model"]
    if "shadow" not in answer:
        print(
            f"model {name} has no shadow; `tsx models shadow {name} --version VERSION --share 10%`"
            " begins one"
        )
        return
    fields, requests, errors = answer["shadow"], answer["requests"], answer["errors"]
    state = answer["state"] + (f": {one_line(answer['why'])}" if "why" in answer else "")
    comparison = comparison_text(fields["compare"], answer.get("tolerance"))
    print(
        f"{name}: {fields['share']:g} % to version {answer['version']}, compared by {comparison}; {state}"
    )
    print(
        f"since {answer['since'][:19]}Z: {requests['copied']} copied, {requests['under_way']} of"
        " them under way"
    )
    if requests["shed"]:
        print(
            "not copied:"
            f" {', '.join(f'{count} {reason}' for reason, count in sorted(requests['shed'].items()))}"
        )
    rate = answer.get("disagreement")
    confidence_text = (
        f" ({_percent(rate['rate'])}; 95 % confidence: {_percent(rate['low'])} to"
        f" {_percent(rate['high'])})"
        if rate
        else ""
    )
    print(f"{answer['agreed']} agreed, {answer['disagreed']} disagreed{confidence_text}")
    if "largest_difference" in answer:
        print(f"largest difference of two numbers: {answer['largest_difference']:.3g}")
    if errors["comparison"]:
        print(
            f"{errors['comparison']} could not be compared:"
            f" {one_line(answer.get('last_problem', ''))}"
        )
    latency = answer.get("latency")
    if latency:
        rows = [
            (side, latency[side]["p50"], latency[side]["p99"], errors[side])
            for side in ("primary", "shadow")
        ]
        print_table([f"newest {latency['requests']}", "p50 ms", "p99 ms", "errors"], rows)
    for example in answer["examples"][:examples]:
        _show_example(example)


def _show_example(example: dict[str, Any]) -> None:
    print(
        f"\n{example['at'][:19]}Z request {one_line(example['request_id'])}:"
        f" {one_line(example['why'])}"
    )
    print(f"  request  {_body(example['body'])}")
    for side in ("primary", "shadow"):
        answer = example[side]
        print(
            f"  {side:8} {answer['version']}: {answer['status']} after {answer['ms']:g} ms:"
            f" {_body(answer['body'])}"
        )


def _body(body: dict[str, Any]) -> str:
    """Return a body as one line.

    Control characters are replaced, because a client's text must not control the terminal.
    """
    if "text" not in body:
        return f"{body['size']} bytes"
    text = body["text"]
    printable_text = "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "?"
        for letter in text[:MAX_BODY_CHARS]
    )
    return (
        printable_text
        if len(text) <= MAX_BODY_CHARS and len(text.encode()) == body["size"]
        else f"{printable_text}... ({body['size']} bytes)"
    )


def _percent(rate: float) -> str:
    return f"{100 * rate:.3g} %"
