"""`tsx models shadow` against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import serving
from tsx_archiver.quantities import parse_percent
from tsx_cli.common.compare_option import read_compare
from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import read_option
from tsx_cli.models.shadow import _body, _show_example

NUMBER = """
def handle(data, context):
    return data and [{"label": context.manifest["model"]["modelVersion"], "score": 0.5}] * len(data)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exact", {"kind": "exact"}),
        ("numeric:rtol=1e-3,atol=0", {"kind": "numeric", "rtol": 1e-3, "atol": 0.0}),
        ("top-k:k=5", {"kind": "top-k", "k": 5}),
        ("plugin:mine", {"kind": "plugin", "name": "mine"}),
        ("plugin:mine,timeout=2.5", {"kind": "plugin", "name": "mine", "timeout": 2.5}),
    ],
)
def test_a_comparison_is_read(text: str, said: dict[str, Any]) -> None:
    assert read_compare(text) == said


@pytest.mark.parametrize(
    "text", ["top-k:five", "top-k:k=five", "numeric:rtl=1", "plugin:a,b", "exact:yes"]
)
def test_what_is_no_comparison_is_reported_what_one_looks_like(text: str) -> None:
    with pytest.raises(UsageError, match="--compare takes numeric:rtol=1e-3"):
        read_compare(text)


def test_a_share_is_read_with_and_without_its_sign() -> None:
    read = partial(read_option, parse_percent, option="--share", usage="a percentage such as 10%")
    assert (read("10%"), read("10"), read("0.5 %")) == (10, 10, 0.5)
    with pytest.raises(UsageError, match="such as 10%, not 'ten'"):
        read("ten")


def test_what_clients_sent_does_not_steer_the_terminal() -> None:
    assert _body({"size": 9, "text": "\x1b[2Ja\nb c"}) == "?[2Ja b c"
    assert _body({"size": 5000, "text": "x" * 2048}) == "x" * 100 + "... (5000 bytes)"
    assert _body({"size": 7, "base64": "//79"}) == "7 bytes"


def test_what_handlers_said_does_not_steer_it_either(capsys: pytest.CaptureFixture[str]) -> None:
    side = {"version": "1.0", "status": 200, "ms": 1.0, "body": {"size": 4, "text": "\x1b[2J"}}
    _show_example(
        {
            "at": "2026-01-01T00:00:00Z",
            "request_id": "\x9bid",
            "why": "a: \x1b]0;x\nb",
            "body": side["body"],
            "primary": side,
            "shadow": side,
        }
    )
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"request \x9bid: a: \x1b]0;x\nb" in shown


def test_a_shadow_is_begun_shown_and_ended_from_a_terminal(
    run: Callable[..., Any],
    tmp_path: Path,
    user_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for number in ("1.0", "2.0"):
        make_model(store / f"twin-{number}.mar", NUMBER, name="twin", version=number)
    (tmp_path / "tsx.toml").write_text(
        '[models.twin.traffic]\nshadow = { to = "2.0", share = 100, compare = { kind = "top-k" } }\n'
    )
    environment = user_environment | {"TSX_WORKER_PRELOAD": "false", "TSX_LOAD_MODELS": "all"}
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", user_environment["TSX_MANAGEMENT_ADDRESS"])
    predict = f"{user_environment['TSX_INFERENCE_ADDRESS']}/predictions/twin"

    def shadow(*words: str, code: int = 0) -> str:
        done = run("models", "shadow", "twin", *words)
        assert done.code == code, done.err
        return str(done.err if code else done.out)

    def reported() -> Any:
        return json.loads(shadow("--json"))

    with serving(["serve", "--model-store", store], tmp_path, environment):
        assert run("models", "set-default", "twin", "--version", "1.0").code == 0
        assert httpx.post(predict, content=b"a question", timeout=60).json()["label"] == "1.0"
        deadline = time.monotonic() + 60
        while not reported()["disagreed"] and time.monotonic() < deadline:
            pass  # a command lasts as long as a pause would
        shown = shadow().splitlines()
        assert shown[0] == "twin: 100 % to version 2.0, compared by top-k; running"
        assert shown[1].endswith("1 copied, 0 of them under way")
        assert shown[2] == "0 agreed, 1 disagreed (100 %; 95 % confidence: 20.7 % to 100 %)"
        assert [line.split()[0] for line in shown[3:6]] == ["newest", "primary", "shadow"]
        assert shown[7].endswith(": top labels: 1.0 (primary), 2.0 (shadow)")
        assert shown[8] == "  request  a question"
        changed = shadow("--share", "50%", "--ignore", "label", "--ignore", "took").splitlines()
        assert (
            changed[0]
            == "twin: 50 % to version 2.0, compared by top-k, without label, took; running"
        )
        assert changed[2] == "0 agreed, 0 disagreed"
        assert "0 copied" in shadow("--reset")
        assert "no plugin 'mine' compares" in shadow("--compare", "plugin:mine", code=1)
        assert "--off ends the shadow" in shadow("--off", "--share", "5", code=2)
        assert shadow("--off").splitlines()[0].endswith("; off")
        assert reported()["state"] == "off"
        httpx.delete(f"{user_environment['TSX_MANAGEMENT_ADDRESS']}/models/twin/2.0", timeout=60)
        assert (
            shadow("--version", "3.0", "--share", "5", "--force")
            .splitlines()[0]
            .endswith("; waiting: Version 3.0 is not registered.")
        )
