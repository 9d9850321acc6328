"""The log of a server's start says what rights its models have."""

from __future__ import annotations

import os

import pytest

from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.server.startup import log_privileges

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX users")


@pytest.mark.parametrize(("user", "platform_decides", "warns"), [(0, False, True), (0, True, False), (1000, False, False)])
def test_a_server_of_root_warns_unless_the_platform_chose_the_user(
    user: int, platform_decides: bool, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    log_privileges(Settings(), {}, platform_decides=platform_decides)
    assert ("runs as root" in caplog.text) is warns


def test_variables_that_models_do_not_see_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tsx.server"):
        log_privileges(Settings(), {"HF_TOKEN": "value", "TSX_MANAGEMENT_TOKEN": "secret", "PATH": "/bin"}, platform_decides=True)
    assert "pass_env names them: HF_TOKEN" in caplog.text
    assert "value" not in caplog.text
    assert "TSX_MANAGEMENT_TOKEN" not in caplog.text
