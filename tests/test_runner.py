"""The processes that run tests, forked from one that has collected them, report what failed there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.slow]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Below `tests`, since modules elsewhere are imported in another way; pytest looks into no
    directory `build` by itself.
    """
    made = ROOT / "tests" / "build" / tmp_path.name
    made.mkdir(parents=True)
    yield made
    shutil.rmtree(made)
    made.parent.rmdir()


def test_a_file_that_cannot_be_imported_is_reported(directory: Path) -> None:
    """Its module stays in sys.modules, where it has no tests."""
    (directory / "test_broken.py").write_text("from json import nothing\n\ndef test(): pass\n")
    (directory / "test_sound.py").write_text("def test(): pass\n")
    words = ["-p", "no:cacheprovider", "-n", "1", "--dist", "loadfile"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, directory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert "cannot import name 'nothing'" in ended.stdout
    assert "1 passed, 1 error" in ended.stdout
