"""Lists in the documentation match the code."""

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
def test_generated_files_are_up_to_date() -> None:
    command = [sys.executable, ROOT / "scripts" / "update_docs.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_documented_keys_of_the_model_configuration_exist() -> None:
    configuration = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    documented_keys = {
        key
        for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", configuration, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    config_keys = keys_of(ModelConfig)
    assert (
        {"minWorkers", "batchSize"}
        <= documented_keys - set(Settings.model_fields)
        <= config_keys.keys()
    )
    assert config_keys.keys() <= documented_keys


def test_the_installation_page_lists_every_extra() -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    listed_extras = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    extras = set(
        tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
    )
    assert listed_extras == extras - {"dev", "docs"}


def test_the_readme_is_short_and_its_images_are_small() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160
    pictures = {file.name: file.stat().st_size for file in (ROOT / "docs" / "images").iterdir()}
    assert set(pictures) == {"page.png", "report.png"}
    assert max(pictures.values()) < 200_000
