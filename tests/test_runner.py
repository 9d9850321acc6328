"""Reports of the processes that run tests."""

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
    """Make a directory `build` in `tests`, which pytest does not collect by default.

    Modules of other directories would be imported in another way.
    """
    path = ROOT / "tests" / "build" / tmp_path.name
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)
    path.parent.rmdir()


def test_a_file_that_cannot_be_imported_is_reported(directory: Path) -> None:
    """Such a module remains in sys.modules without tests."""
    (directory / "test_broken.py").write_text("from json import nothing\n\ndef test(): pass\n")
    (directory / "test_sound.py").write_text("def test(): pass\n")
    options = ["-p", "no:cacheprovider", "-n", "1", "--dist", "loadfile"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, directory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "cannot import name 'nothing'" in result.stdout
    assert "1 passed, 1 error" in result.stdout
