"""The log of a rollout's decisions, which is read only when a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_runtime.core.rollouts.decision_log import MAX_LINES, DecisionLog


def test_the_next_server_has_what_was_decided_before(tmp_path: Path) -> None:
    logs = DecisionLog(tmp_path)
    for number in range(MAX_LINES + 5):
        logs.add("digits", {"step": number})
    logs.close()
    again = DecisionLog(tmp_path)
    assert [line["step"] for line in again.read("digits")] == list(range(5, MAX_LINES + 5))
    assert again.read("faces") == []
    again.close()


def test_a_line_that_did_not_come_whole_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "digits.jsonl").write_text('{"step": 1}\n{"ste\n[]\n{"step": 2}\n{"st')
    logs = DecisionLog(tmp_path)
    assert logs.read("digits") == [{"step": 1}, {"step": 2}]
    logs.close()


def test_nothing_is_read_once_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = DecisionLog(tmp_path)
    monkeypatch.setattr("tsx_runtime.core.rollouts.decision_log._read_lines", None)
    logs.add("digits", {"step": 1})
    assert logs.read("digits") == [{"step": 1}]
    logs.close()


def test_a_link_in_the_place_of_a_log_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "digits.jsonl").symlink_to(tmp_path / "victim")
    logs = DecisionLog(tmp_path)
    logs.add("digits", {"step": 1})
    logs.close()
    assert not (tmp_path / "victim").exists()
    assert "cannot be written: " in caplog.text
