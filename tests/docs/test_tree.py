"""The file tree of the README is that of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_names_every_file_with_what_it_is_for() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "tree.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
