"""`tsx models rollout` moves requests to another version step by step, and shows the progress."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any

import typer

from tsx_archiver.quantities import parse_percent, parse_seconds, parse_share
from tsx_cli.common.client import RequestFailed, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.management import with_server
from tsx_cli.common.options import AsJson, ModelName, read_option
from tsx_cli.common.output import one_line, print_json, print_table, rounded

POLL_INTERVAL_S = 1.0
P99 = "a factor such as 1.2x, or a time such as 250ms"
NO_ROLLOUT = "RolloutNotFoundException"


@with_server
def rollout(
    server: Server,
    name: ModelName,
    version: Annotated[
        str | None,
        typer.Option(help="The version or label to roll out; without it, the rollout is shown."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Percentage at each step.", show_default="1,5,25,100")
    ] = None,
    bake: Annotated[
        str | None, typer.Option(help="Duration of a step: 30s, 10m, 2h, 1d.", show_default="10m")
    ] = None,
    max_error_rate: Annotated[
        str | None, typer.Option(help="Share of its requests that may fail, such as 0.5%.")
    ] = None,
    max_p99: Annotated[
        str | None, typer.Option(help="Highest p99: 1.2x the old version's, or 250ms.")
    ] = None,
    min_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests required per step.", show_default="100")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Quality that may not get worse: accuracy or mean_error."),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(
            help="How much worse: 1% of accuracy, or a part of the mean error.",
            show_default="1%, or 5% of the mean error",
        ),
    ] = None,
    guard: Annotated[
        list[str] | None, typer.Option(help="Another bound, such as drift<0.2; repeatable.")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Show each decision until it ends; exits 1 unless it finished."
        ),
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the rollout and return to the old version.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --stop: leave the shares as they are.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move a model's requests to another version step by step while its checks pass.

    Without a version, show, watch or stop the rollout.
    """
    options = {
        "steps": steps,
        "bake": bake,
        "max_error_rate": max_error_rate,
        "max_p99": max_p99,
        "min_requests": min_requests,
        "metric": metric,
        "margin": margin,
        "guard": guard or None,
    }
    if version is None and (
        given_options := [
            f"--{option.replace('_', '-')}"
            for option, value in options.items()
            if value is not None
        ]
    ):
        command = f"tsx models rollout {name} --version 2.0 {given_options[0]} ..."
        raise UsageError(
            f"{given_options[0]} belongs to a new rollout: give the version, as in `{command}`"
        )
    if stop and (version is not None or watch):
        raise UsageError(
            "--stop ends the current rollout; use it without a version and without --watch"
        )
    if keep and not stop:
        raise UsageError("--keep applies to --stop; use both")
    target = path("models", name, "rollout")
    if stop:
        answer = server.call(
            "DELETE", path("models", name, "rollout", back="false" if keep else "true")
        ).json()
    elif version is not None:
        answer = server.call_json(
            "POST",
            target,
            {
                **_plan(version, steps, bake, max_error_rate, max_p99, min_requests),
                **_quality(metric, margin, guard),
            },
        )
    else:
        answer = _status(server, target, name)
    if watch:
        answer = _watch(server, target, answer, quiet=as_json)
    if as_json:
        print_json(answer)
    elif not watch:
        _show(answer)
    if watch and answer["status"] != "finished":
        raise CliError(f"the rollout of {name} {answer['status']}: {answer['reason']}")


def _status(server: Server, target: str, name: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = server.call("GET", target).json()
    except RequestFailed as error:
        if error.type == NO_ROLLOUT:
            raise CliError(
                f"Model {name} has no rollout; `tsx models rollout {name} --version VERSION`"
                " begins one"
            ) from None
        raise
    return answer


def _plan(
    version: str,
    steps: str | None,
    bake: str | None,
    max_error_rate: str | None,
    max_p99: str | None,
    min_requests: int | None,
) -> dict[str, Any]:
    plan: dict[str, Any] = {"version": version}
    if steps is not None:
        plan["steps"] = [
            read_option(parse_percent, step, "--steps", "percentages such as 1,5,25,100")
            for step in steps.split(",")
        ]
    if bake is not None:
        plan["bake"] = read_option(
            parse_seconds, bake, "--bake", "a time such as 30s, 10m, 2h or 1d"
        )
    if max_error_rate is not None:
        plan["max_error_rate"] = read_option(
            parse_share, max_error_rate, "--max-error-rate", "a share such as 0.5% or 0.005"
        )
    if max_p99 is not None and max_p99.endswith("x"):
        plan["max_p99_ratio"] = read_option(float, max_p99.removesuffix("x"), "--max-p99", P99)
    elif max_p99 is not None:
        plan["max_p99_ms"] = read_option(_milliseconds, max_p99, "--max-p99", P99)
    if min_requests is not None:
        plan["min_requests"] = min_requests
    return plan


def _quality(metric: str | None, margin: str | None, guards: list[str] | None) -> dict[str, Any]:
    """Return the keys of a plan that need the model's monitoring."""
    plan: dict[str, Any] = {"metric": metric, "guards": guards or None}
    if margin is not None:
        plan["margin"] = read_option(parse_share, margin, "--margin", "a share such as 1% or 0.01")
    return {key: value for key, value in plan.items() if value is not None}


def _milliseconds(text: str) -> float:
    if not text[-1:].isalpha():
        raise ValueError("without a unit it could be a factor as well")
    return 1000 * parse_seconds(text)


def _watch(server: Server, target: str, answer: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Print the decisions until the rollout ends.

    If the server restarts meanwhile, it continues the rollout.
    """
    last_printed, problem = 0.0, ""
    while True:
        for entry in answer["log"]:
            if entry["at"] > last_printed and entry["at"] >= answer["began"]:
                last_printed = entry["at"]
                if not quiet:
                    print(_line(entry), flush=True)
        if answer["status"] != "running":
            return answer
        time.sleep(POLL_INTERVAL_S)
        try:
            answer = server.call("GET", target).json()
            problem = ""
        except RequestFailed:
            raise
        except CliError as error:
            if not quiet and error.message != problem:
                print(f"{error.message}; trying again", flush=True)
            problem = error.message


def _show(answer: dict[str, Any]) -> None:
    plan, share = answer["plan"], answer["share"]
    step = f"step {answer['step']} of {len(plan['steps'])}, {share:g} % for {plan['version']}"
    head = f"{answer['model']}: {answer['old']} -> {plan['version']}, {answer['status']}"
    print(f"{head}; {step}, for {answer['seconds']:.0f} of {plan['bake']:g} s")
    print(f"{one_line(answer['reason'])}\n")
    rows = [
        (
            number,
            counts["requests"],
            counts["errors"],
            f"{counts['error_rate']:.2%}",
            _ms(counts.get("p50_ms")),
            _ms(counts.get("p99_ms")),
        )
        for number, counts in (
            (answer["old"], answer["old_counts"]),
            (plan["version"], answer["new_counts"]),
        )
    ]
    print_table(["version", "requests", "errors", "rate", "p50 ms", "p99 ms"], rows)
    # The log also contains the decisions of earlier rollouts.
    decisions = [entry for entry in answer["log"] if entry["at"] >= answer["began"]]
    if decisions:
        print()
    for entry in decisions[-20:]:
        print(_line(entry))


def _line(entry: dict[str, Any]) -> str:
    time_text = datetime.fromtimestamp(entry["at"]).strftime("%H:%M:%S")
    new, old = entry["new"], entry["old"]
    counts_text = ""
    if new["requests"]:
        counts_text = (
            f" ({entry['to']}: {new['requests']} requests, {new['error_rate']:.2%} failed, p99"
            f" {_ms(new.get('p99_ms'))} ms"
        )
        counts_text += (
            f"; {entry['from']}: {old['requests']}, {old['error_rate']:.2%},"
            f" {_ms(old.get('p99_ms'))} ms)"
        )
    decision = f"{entry['event']} at {entry['share']:g} %: {one_line(entry['reason'])}"
    return f"{time_text}  {decision}{counts_text}"


def _ms(value: float | None) -> str:
    return "-" if value is None else rounded(value)
