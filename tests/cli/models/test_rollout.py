"""`tsx models rollout` against a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import serving
from tsx_cli.common.failure import UsageError
from tsx_cli.models.rollout import _plan, _show

NUMBER = """
def handle(data, context):
    return data and [context.manifest["model"]["modelVersion"]] * len(data)
"""


def test_a_plan_is_read() -> None:
    assert _plan("2.0", "1,5%,100", "10m", "0.5%", "1.2x", 50) == {
        "version": "2.0",
        "steps": [1, 5, 100],
        "bake": 600,
        "max_error_rate": 0.005,
        "max_p99_ratio": 1.2,
        "min_requests": 50,
    }
    assert _plan("v2", None, None, "0.01", "250ms", None) == {
        "version": "v2",
        "max_error_rate": 0.01,
        "max_p99_ms": 250,
    }
    assert _plan("v2", None, "1.5h", None, "2s", None) == {
        "version": "v2",
        "bake": 5400,
        "max_p99_ms": 2000,
    }


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (("a",), "--steps"),
        ((None, "soon"), "--bake"),
        ((None, None, "few"), "--max-error-rate"),
        ((None, None, None, "1.2"), "--max-p99"),
    ],
)
def test_what_is_no_plan_is_reported_by_its_option(
    given: tuple[str | None, ...], option: str
) -> None:
    words = [*given, *[None] * 4][:4]
    with pytest.raises(UsageError, match=f"^{option} takes .* such as"):
        _plan("2.0", *words, None)  # type: ignore[arg-type]


def test_times_have_units() -> None:
    assert [
        _plan("v2", None, text, None, None, None)["bake"]
        for text in ("500ms", "30s", "10m", "2h", "1d")
    ] == [
        0.5,
        30,
        600,
        7200,
        86400,
    ]


def test_a_step_without_requests_yet_has_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    none = {
        "requests": 0,
        "errors": 0,
        "error_rate": 0.0,
    }  # the server leaves out what is not known
    plan = {"version": "2.0", "steps": [50, 100], "bake": 2.0}
    reported = {
        "model": "m",
        "old": "1.0",
        "status": "running",
        "plan": plan,
        "step": 1,
        "share": 50,
        "seconds": 0.0,
        "reason": "begun",
        "began": 0,
    }
    _show({**reported, "old_counts": none, "new_counts": none, "log": []})
    assert capsys.readouterr().out.count("0.00%") == 2


def test_only_the_decisions_of_this_rollout_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"requests": 2, "errors": 0, "error_rate": 0.0, "p99_ms": 10243.17}
    log = [
        {
            "at": at,
            "event": "begun",
            "share": 5,
            "reason": reason,
            "from": "1.0",
            "to": "2.0",
            "new": counts,
            "old": counts,
        }
        for at, reason in ((1.0, "the earlier one"), (10.0, "this one"))
    ]
    plan = {"version": "2.0", "steps": [50, 100], "bake": 2.0}
    reported = {
        "model": "m",
        "old": "1.0",
        "status": "running",
        "plan": plan,
        "step": 1,
        "share": 50,
        "seconds": 0.0,
        "reason": "begun",
    }
    _show({**reported, "old_counts": counts, "new_counts": counts, "log": log, "began": 10.0})
    shown = capsys.readouterr().out
    assert "this one (2.0: 2 requests, 0.00% failed, p99 10,243 ms" in shown
    assert "the earlier one" not in shown


def test_a_rollout_is_begun_watched_and_shown_from_a_terminal(
    run: Callable[..., Any],
    tmp_path: Path,
    user_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for number in ("1.0", "2.0"):
        make_model(store / f"digits-{number}.mar", NUMBER, name="digits", version=number)
    environment = user_environment | {"TSX_WORKER_PRELOAD": "false", "TSX_LOAD_MODELS": "all"}
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", user_environment["TSX_MANAGEMENT_ADDRESS"])
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=user_environment["TSX_INFERENCE_ADDRESS"], timeout=60) as client:
            while not stop.wait(0.003):
                client.post("/predictions/digits", content=b"x").raise_for_status()

    with serving(["serve", "--model-store", store], tmp_path, environment) as running:
        models = ["models", "rollout", "digits"]
        shown = run(*models)
        assert shown.code == 1
        assert (
            "Model digits has no rollout"
            in shown.err
        )
        default = httpx.get(
            f"{user_environment['TSX_MANAGEMENT_ADDRESS']}/models/digits/traffic", timeout=60
        ).json()["default"]
        other = "2.0" if default == "1.0" else "1.0"
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            bounds = ["--max-error-rate", "1%", "--min-requests", "10"]
            words = ["--version", other, "--steps", "50,100", "--bake", "400ms", *bounds, "--watch"]
            watched = run(*models, *words)
        finally:
            stop.set()
            asking.join()
        assert watched.code == 0, watched.err
        events = [line.split("  ")[1].split(" at ")[0] for line in watched.out.splitlines()]
        assert events == ["start", "advance", "finished"]
        assert "each step needs 10 of its answers" in watched.out.splitlines()[0]
        assert f"{default} -> {other}, finished" in run(*models).out
        assert json.loads(run(*models, "--json").out)["status"] == "finished"
        wrong = run(*models, "--bake", "1m")
        assert wrong.code == 2
        assert "--bake belongs to a new rollout" in wrong.err
        assert run(*models, "--stop").code == 1
        begun = run(*models, "--version", default, "--bake", "1h")
        assert "step 1 of 4, 1 % for" in begun.out
        ended = run(*models, "--stop")
        assert "went back" in ended.out
        assert running.stop() == 0
