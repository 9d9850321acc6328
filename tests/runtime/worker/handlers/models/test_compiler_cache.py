"""The cache of torch.compile, in a directory to which nobody else can write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tsx_runtime.worker.handlers.models.compiler_cache import CACHE_VARIABLE, protect_compiler_cache

STRANGER = 54321


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # monkeypatch restores only variables that it has set before.
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.delenv(CACHE_VARIABLE)
    return tmp_path


def test_the_cache_has_torchs_default_path(temporary_directory: Path) -> None:
    protect_compiler_cache()

    # The import takes seconds; at the top it would slow down the collection of tests.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert os.environ[CACHE_VARIABLE] == default_cache_dir()
    assert Path(os.environ[CACHE_VARIABLE]).stat().st_mode & 0o777 == 0o700


def test_a_cache_that_the_user_has_configured_is_kept(
    temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/somewhere")
    protect_compiler_cache()
    assert os.environ[CACHE_VARIABLE] == "/somewhere"
    assert list(temporary_directory.iterdir()) == []


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can give a directory to another user",
)
def test_a_cache_of_another_user_is_replaced_by_a_new_one(
    temporary_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    protect_compiler_cache()
    cache = Path(os.environ.pop(CACHE_VARIABLE))
    os.chown(cache, STRANGER, STRANGER)
    protect_compiler_cache()
    chosen = Path(os.environ[CACHE_VARIABLE])
    assert chosen != cache
    assert (chosen.stat().st_uid, chosen.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert f"{cache} belongs to another user" in caplog.text
