"""The lists of the documentation are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from tsx_archiver.metadata.keys import keys_of
from tsx_archiver.metadata.modelconfig import ModelConfig
from tsx_runtime.settings.schema import Settings

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("processes")
def test_generated_files_are_those_of_the_code() -> None:
    command = [sys.executable, ROOT / "scripts" / "update_docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_keys_of_the_model_configuration_exist() -> None:
    configuration = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    named = {
        key
        for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", configuration, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    known = keys_of(ModelConfig)
    assert {"minWorkers", "batchSize"} <= named - set(Settings.model_fields) <= known.keys()
    assert known.keys() <= named


def test_the_page_on_installing_lists_every_extra() -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    extras = set(
        tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
    )
    assert listed == extras - {"dev", "docs"}


def test_readme_is_read_in_a_minute_and_its_pictures_are_small() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160
    pictures = {file.name: file.stat().st_size for file in (ROOT / "docs" / "images").iterdir()}
    assert set(pictures) == {"page.png", "report.png"}
    assert max(pictures.values()) < 200_000
