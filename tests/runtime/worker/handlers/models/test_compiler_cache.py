"""Where torch.compile keeps machine code is a directory that nobody else can write to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tsx_runtime.worker.handlers.models.compiler_cache import VARIABLE, protect_compiler_cache

STRANGER = 54321


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    return tmp_path


def test_it_is_where_torch_looks_and_made_before_anybody_else_can(temporary: Path) -> None:
    protect_compiler_cache()

    from torch._inductor.runtime.cache_dir_utils import (
        default_cache_dir,
    )  # here: seconds of each process that collects tests

    assert os.environ[VARIABLE] == default_cache_dir()
    assert Path(os.environ[VARIABLE]).stat().st_mode & 0o777 == 0o700


def test_one_that_was_set_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere")
    protect_compiler_cache()
    assert os.environ[VARIABLE] == "/somewhere"
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can give a directory to another user",
)
def test_where_another_user_has_taken_the_name_a_new_one_is_made(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    protect_compiler_cache()
    taken = Path(os.environ.pop(VARIABLE))
    os.chown(taken, STRANGER, STRANGER)
    protect_compiler_cache()
    chosen = Path(os.environ[VARIABLE])
    assert chosen != taken
    assert (chosen.stat().st_uid, chosen.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert f"{taken} belongs to another user" in caplog.text
