"""Warnings in the log at a server's start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.server.startup import check_settings, warn_of_unknown_models
from tsx_runtime.settings.schema import ModelSettings, Settings

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX users")


@pytest.mark.parametrize(
    ("user", "platform_decides", "warns"),
    [(0, False, True), (0, True, False), (1000, False, False)],
)
def test_a_server_run_by_root_warns_unless_the_platform_chose_the_user(
    user: int,
    platform_decides: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    check_settings(Settings(), {}, platform_decides=platform_decides)
    assert ("runs as root" in caplog.text) is warns


def test_hidden_variables_are_listed_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tsx.server"):
        check_settings(
            Settings(),
            {"HF_TOKEN": "value", "TSX_MANAGEMENT_TOKEN": "secret", "PATH": "/bin"},
            platform_decides=True,
        )
    assert "pass_env names them: HF_TOKEN" in caplog.text
    assert "value" not in caplog.text
    assert "TSX_MANAGEMENT_TOKEN" not in caplog.text


def test_settings_of_an_unserved_model_are_warned_of_with_a_suggestion(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    models = {"digit": ModelSettings(), "digits": ModelSettings()}
    settings = Settings(
        models=models,
        model_versions={"other": {}},
        trust_remote_code=["digits", "bart"],
        state_dir=tmp_path,  # Another process may use the one of the user.
    )
    registry = Registry(settings)
    registry.loaded_on_request = ["digits", "bert"]
    warn_of_unknown_models(registry)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    hidden_line, other_settings, bart = (record.getMessage() for record in caplog.records)
    assert "'digit'" in hidden_line
    assert hidden_line.endswith("did you mean 'digits'?")
    assert other_settings.endswith("none of that name is served now")
    assert bart.endswith("did you mean 'bert'?")
