"""`tsx models rollout` against a real server."""

from __future__ import annotations

import json
import threading

import pytest

from tests.cli.conftest import Run
from tests.cli.models.conftest import TwoVersions
from tsx_cli.common.failure import UsageError
from tsx_cli.models.rollout import _plan, _quality, _show

PLAN = {"version": "2.0", "steps": [50, 100], "bake": 2.0}
RUNNING = {"model": "m", "old": "1.0", "status": "running", "plan": PLAN, "step": 1, "share": 50}
RUNNING |= {"seconds": 0.0, "reason": "begun"}


def test_a_plan_is_parsed() -> None:
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


def test_a_metric_and_guards_are_parsed() -> None:
    assert _quality("accuracy", "1%", ["drift<0.2"]) == {
        "metric": "accuracy",
        "margin": 0.01,
        "guards": ["drift<0.2"],
    }
    assert _quality("mean_error", "0%", []) == {"metric": "mean_error", "margin": 0}
    assert _quality(None, None, None) == {}
    with pytest.raises(UsageError, match=r"^--margin takes a share"):
        _quality("accuracy", "little", None)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("a",), "--steps"),
        ((None, "soon"), "--bake"),
        ((None, None, "few"), "--max-error-rate"),
        ((None, None, None, "1.2"), "--max-p99"),
    ],
)
def test_the_error_of_an_invalid_plan_names_the_option(
    arguments: tuple[str | None, ...], option: str
) -> None:
    values = [*arguments, *[None] * 4][:4]
    with pytest.raises(UsageError, match=f"^{option} takes .* such as"):
        _plan("2.0", *values, None)  # type: ignore[arg-type]


def test_durations_have_units() -> None:
    seconds = {"500ms": 0.5, "30s": 30, "10m": 600, "2h": 7200, "1d": 86400}
    for text, bake in seconds.items():
        assert _plan("v2", None, text, None, None, None)["bake"] == bake


def test_a_step_without_requests_has_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    # The server omits unknown figures.
    empty_counts = {"requests": 0, "errors": 0, "error_rate": 0.0}
    _show(
        {**RUNNING, "old_counts": empty_counts, "new_counts": empty_counts, "log": [], "began": 0}
    )
    assert capsys.readouterr().out.count("0.00%") == 2


def test_only_decisions_of_the_current_rollout_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = {"requests": 2, "errors": 0, "error_rate": 0.0, "p99_ms": 10243.17}
    versions = {"from": "1.0", "to": "2.0", "new": counts, "old": counts}
    log = [
        {"at": time, "event": "begun", "share": 5, "reason": reason, **versions}
        for time, reason in ((1.0, "the earlier one"), (10.0, "this one"))
    ]
    _show({**RUNNING, "old_counts": counts, "new_counts": counts, "log": log, "began": 10.0})
    output = capsys.readouterr().out
    assert "this one (2.0: 2 requests, 0.00% failed, p99 10,243 ms" in output
    assert "the earlier one" not in output


def test_a_rollout_is_started_watched_and_shown_by_the_command(
    run: Run, two_versions: TwoVersions
) -> None:
    stop = threading.Event()

    def send_requests() -> None:
        while not stop.wait(0.003):
            two_versions.ask()

    with two_versions.serving() as running:
        rollout = "models rollout digits"
        status = run(rollout)
        assert status.code == 1
        assert "Model digits has no rollout" in status.err
        default = json.loads(run("models traffic digits --json").out)["default"]
        candidate = "2.0" if default == "1.0" else "1.0"
        thread = threading.Thread(target=send_requests)
        thread.start()
        try:
            bounds = "--max-error-rate 1% --min-requests 10"
            plan = f"--version {candidate} --steps 50,100 --bake 400ms"
            result = run(f"{rollout} {plan} {bounds} --watch")
        finally:
            stop.set()
            thread.join()
        assert result.code == 0, result.err
        events = [line.split("  ")[1].split(" at ")[0] for line in result.out.splitlines()]
        assert events == ["start", "advance", "finished"]
        assert "each step needs 10 of its answers" in result.out.splitlines()[0]
        assert f"{default} -> {candidate}, finished" in run(rollout).out
        assert json.loads(run(f"{rollout} --json").out)["status"] == "finished"
        invalid = run(f"{rollout} --bake 1m")
        assert invalid.code == 2
        assert "--bake belongs to a new rollout" in invalid.err
        assert "--guard belongs to a new rollout" in run(f"{rollout} --guard drift<0.2").err
        unmonitored = run(f"{rollout} --version {default} --metric accuracy --margin 1%")
        assert unmonitored.code == 1
        assert "A rollout with a metric or a guard cannot start" in unmonitored.err
        assert run(f"{rollout} --stop").code == 1
        new_rollout = run(f"{rollout} --version {default} --bake 1h")
        assert "step 1 of 4, 1 % for" in new_rollout.out
        assert "went back" in run(f"{rollout} --stop").out
        assert running.stop() == 0
