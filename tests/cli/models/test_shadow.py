"""`tsx models shadow` against a real server."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Run
from tests.cli.models.conftest import TwoVersions
from tsx_archiver.quantities import parse_percent
from tsx_cli.common.compare_option import read_compare
from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import read_option
from tsx_cli.models.shadow import _body, _show_example


@pytest.mark.parametrize(
    ("text", "compare"),
    [
        ("exact", {"kind": "exact"}),
        ("numeric:rtol=1e-3,atol=0", {"kind": "numeric", "rtol": 1e-3, "atol": 0.0}),
        ("top-k:k=5", {"kind": "top-k", "k": 5}),
        ("plugin:mine", {"kind": "plugin", "name": "mine"}),
        ("plugin:mine,timeout=2.5", {"kind": "plugin", "name": "mine", "timeout": 2.5}),
    ],
)
def test_a_comparison_is_parsed(text: str, compare: dict[str, Any]) -> None:
    assert read_compare(text) == compare


@pytest.mark.parametrize(
    "text", ["top-k:five", "top-k:k=five", "numeric:rtl=1", "plugin:a,b", "exact:yes"]
)
def test_the_error_of_an_invalid_comparison_gives_a_valid_one(text: str) -> None:
    with pytest.raises(UsageError, match="--compare takes numeric:rtol=1e-3"):
        read_compare(text)


def test_a_share_may_have_a_percent_sign() -> None:
    read_share = partial(
        read_option, parse_percent, option="--share", usage="a percentage such as 10%"
    )
    assert (read_share("10%"), read_share("10"), read_share("0.5 %")) == (10, 10, 0.5)
    with pytest.raises(UsageError, match="such as 10%, not 'ten'"):
        read_share("ten")


def test_control_characters_of_requests_are_removed() -> None:
    assert _body({"size": 9, "text": "\x1b[2Ja\nb c"}) == "?[2Ja b c"
    assert _body({"size": 5000, "text": "x" * 2048}) == "x" * 100 + "... (5000 bytes)"
    assert _body({"size": 7, "base64": "//79"}) == "7 bytes"


def test_control_characters_of_responses_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert r"request \x9bid: a: \x1b]0;x\nb" in output


def test_a_shadow_is_started_shown_and_ended_by_the_command(
    run: Run, two_versions: TwoVersions
) -> None:
    two_versions.configure('shadow = { to = "2.0", share = 100, compare = { kind = "top-k" } }')

    def shadow(arguments: str = "", code: int = 0) -> str:
        result = run(f"models shadow digits {arguments}")
        assert result.code == code, result.err
        return result.err if code else result.out

    def state() -> Any:
        return json.loads(shadow("--json"))

    with two_versions.serving():
        assert run("models set-default digits --version 1.0").code == 0
        assert two_versions.ask(content=b"a question") == "1.0"
        deadline = time.monotonic() + 60
        while not state()["disagreed"] and time.monotonic() < deadline:
            pass  # The command takes long enough, so no pause is needed.
        lines = shadow().splitlines()
        assert lines[0] == "digits: 100 % to version 2.0, compared by top-k; running"
        assert lines[1].endswith("1 copied, 0 of them under way")
        assert lines[2] == "0 agreed, 1 disagreed (100 %; 95 % confidence: 20.7 % to 100 %)"
        assert [line.split()[0] for line in lines[3:6]] == ["newest", "primary", "shadow"]
        assert lines[7].endswith(": top labels: 1.0 (primary), 2.0 (shadow)")
        assert lines[8] == "  request  a question"
        changed_lines = shadow("--share 50% --ignore label --ignore took").splitlines()
        assert changed_lines[0].endswith("compared by top-k, without label, took; running")
        assert changed_lines[2] == "0 agreed, 0 disagreed"
        assert "0 copied" in shadow("--reset")
        assert "no plugin 'mine' compares" in shadow("--compare plugin:mine", code=1)
        assert "--off ends the shadow" in shadow("--off --share 5", code=2)
        assert shadow("--off").splitlines()[0].endswith("; off")
        assert state()["state"] == "off"
        httpx.delete(f"{two_versions.management}/models/digits/2.0", timeout=60)
        waiting_line = shadow("--version 3.0 --share 5 --force").splitlines()[0]
        assert waiting_line.endswith("; waiting: Version 3.0 is not registered.")
