"""The log of a rollout's decisions, which is read only when a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_runtime.features.rollouts.decision_log import MAX_LINES, DecisionLog


@pytest.mark.slow
def test_decisions_survive_a_server_restart(tmp_path: Path) -> None:
    logs = DecisionLog(tmp_path)
    for number in range(MAX_LINES + 5):
        logs.add("digits", {"step": number})
    logs.close()
    reloaded_log = DecisionLog(tmp_path)
    assert [line["step"] for line in reloaded_log.read("digits")] == list(range(5, MAX_LINES + 5))
    assert reloaded_log.read("faces") == []
    reloaded_log.close()


def test_an_incomplete_line_does_not_lose_others(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "digits.jsonl").write_text('{"step": 1}\n{"ste\n[]\n{"step": 2}\n{"st')
    logs = DecisionLog(tmp_path)
    assert logs.read("digits") == [{"step": 1}, {"step": 2}]
    logs.close()


def test_the_file_is_read_only_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = DecisionLog(tmp_path)
    monkeypatch.setattr("tsx_runtime.features.rollouts.decision_log._read_lines", None)
    logs.add("digits", {"step": 1})
    assert logs.read("digits") == [{"step": 1}]
    logs.close()


def test_a_symlink_at_the_log_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "digits.jsonl").symlink_to(tmp_path / "victim")
    logs = DecisionLog(tmp_path)
    logs.add("digits", {"step": 1})
    logs.close()
    assert not (tmp_path / "victim").exists()
    assert "cannot be written: " in caplog.text
