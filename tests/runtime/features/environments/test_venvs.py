"""Environments of models with real pip, wheels and workers, but without a package index."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.clients.talker import a_registry, ask, gone, order, register, until
from tests.support.models import make_model
from tests.support.wheels import make_wheel
from tsx_runtime.errors import InvalidModel
from tsx_runtime.features.environments.requirements import read_requirements
from tsx_runtime.features.environments.venvs import Environments, environment_key

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes")]

HANDLER = """
import json, os, subprocess, sys
import iniconfig, psutil

def run(script):
    return subprocess.run([script], capture_output=True, text=True, check=True).stdout

def handle(data, context):
    if data is None:
        return None
    told = {
        "version": iniconfig.VERSION, "file": iniconfig.__file__, "psutil": psutil.__file__, "prefix": sys.prefix,
        "environment": os.environ.get("VIRTUAL_ENV"), "script": "VIRTUAL_ENV" in os.environ and run("run-iniconfig"),
    }
    return [json.dumps(told) for _ in data]
"""
# The build of this package writes its process id to a file and never ends.
HANGING = """
import os, time
def build_wheel(*_, **__):
    with open({note!r}, "w") as note:
        note.write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def write_model(
    directory: Path,
    requirements: str,
    *,
    handler: str = HANDLER,
    config: str = "",
    wheels: bool = True,
) -> Path:
    make_model(directory, handler, config=config, requirementsFile="requirements.txt")
    (directory / "requirements.txt").write_text(requirements)
    if wheels:
        make_wheel(directory / "wheels", "iniconfig", "99.0")
    return directory


def write_hanging_model(directory: Path, pid_file: Path) -> Path:
    write_model(directory, "./slow\n", wheels=False)
    (directory / "slow").mkdir()
    (directory / "slow" / "backend.py").write_text(HANGING.format(note=str(pid_file)))
    (directory / "slow" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "slow"\nversion = "1"\n'
    )
    return directory


def an_installing_registry(cache: Path, **settings):
    return a_registry(cache_dir=cache, install_py_dep_per_model=True, **settings)


def list_entries(cache: Path) -> list[Path]:
    return list((cache / "environments" / "entries").iterdir())


async def test_equal_requirements_share_one_environment_that_precedes_the_server(tmp_path, caplog):
    """Load two models at once, one of which has its own interpreter.

    Packages that the server already has are not installed again.
    """
    caplog.set_level("INFO", "tsx.environments")
    cache = tmp_path / "cache"
    first_dir = write_model(tmp_path / "one", "iniconfig==99.0\npsutil\n")
    second_dir = write_model(
        tmp_path / "two", "iniconfig==99.0\npsutil\n", config="useVenv: true\n"
    )

    async with an_installing_registry(cache) as registry:
        versions = await asyncio.gather(
            registry.register_path(first_dir, order()), registry.register_path(second_dir, order())
        )
        first, second = [json.loads(await ask(version, "")) for version in versions]
        [entry] = list_entries(cache)
        for version in (first, second):
            assert version["version"] == "99.0"
            assert Path(version["file"]).is_relative_to(entry / "files")
            assert version["psutil"] == psutil.__file__
        assert (first["prefix"], first["environment"]) == (sys.prefix, None)
        assert second["prefix"] == second["environment"] == str(entry / "files")
        assert second["script"] == "99.0\n"
        assert caplog.text.count("its environment is ready") == 1
        assert "pip: Successfully installed iniconfig-99.0" in caplog.text
        pid = versions[0].workers[0].pid
        await registry.unregister("one")
        assert not psutil.pid_exists(pid)


@pytest.mark.nightly
async def test_a_failed_installation_reports_pips_error_and_leaves_no_files(tmp_path):
    cache = tmp_path / "cache"
    directory = write_model(tmp_path / "m", "no-such-package==1.0\n")

    async with an_installing_registry(cache) as registry:
        with pytest.raises(InvalidModel) as exc_info:
            await registry.register_path(directory, order())
        first, *lines = exc_info.value.message.splitlines()
        assert first == "Custom pip package installation failed for model m"
        assert "ERROR: No matching distribution found for no-such-package==1.0" in lines
        assert (exc_info.value.status, exc_info.value.type) == (400, "ModelException")
        assert not registry.models
        assert list_entries(cache) == list((cache / "environments" / "partial").iterdir()) == []


async def test_forbidden_requirements_are_refused_before_pip_starts(tmp_path):
    directory = write_model(tmp_path / "m", "iniconfig; $(touch here)\n")

    async with an_installing_registry(tmp_path / "cache") as registry:
        with pytest.raises(InvalidModel, match=r"model m\nline 1 of requirements.txt"):
            await registry.register_path(directory, order())
        assert not (directory / "here").exists()


@pytest.mark.nightly
async def test_a_timed_out_installation_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "note"

    async with an_installing_registry(tmp_path / "cache", install_timeout=2) as registry:
        with pytest.raises(InvalidModel, match="stopped after install_timeout"):
            await registry.register_path(write_hanging_model(tmp_path / "m", pid_file), order())
        # The build may not have begun on a slow machine.
        if pid_file.exists() and (pid := pid_file.read_text()):
            await until(lambda: gone(int(pid)))


async def test_an_installation_does_not_block_requests_and_ends_at_a_stop(tmp_path):
    pid_file = tmp_path / "note"

    async with an_installing_registry(tmp_path / "cache") as registry:
        installing = asyncio.create_task(
            registry.register_path(write_hanging_model(tmp_path / "m", pid_file), order())
        )
        second = await register(registry, tmp_path / "other")
        await until(lambda: pid_file.exists() and pid_file.read_text())
        assert await ask(second, "hello") == "hello"
    with pytest.raises(InvalidModel):
        await installing
    await until(lambda: gone(int(pid_file.read_text())))


async def test_without_the_setting_requirements_are_not_installed_but_logged(tmp_path, caplog):
    handler = "def handle(data, context):\n    return data and ['served']\n"
    directory = write_model(tmp_path / "m", "no-such-package\n", handler=handler)

    async with a_registry(cache_dir=tmp_path / "cache") as registry:
        assert await ask(await registry.register_path(directory, order()), "") == "served"
    assert "install_py_dep_per_model is false" in caplog.text


def test_the_environment_key_depends_on_every_input(tmp_path, monkeypatch):
    def key_for(name: str, requirements: str = "iniconfig\n") -> str:
        directory = write_model(tmp_path / name, requirements)
        return environment_key(read_requirements(directory, "requirements.txt"))

    monkeypatch.setattr("importlib.metadata.distributions", list)
    first = key_for("a")
    assert key_for("b") == first
    assert key_for("c", "iniconfig==99.0\n") != first
    make_wheel(tmp_path / "b" / "wheels", "iniconfig", "99.1")
    assert key_for("b") != first
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example.com/simple")
    assert key_for("a") != first


@pytest.mark.nightly
async def test_unused_environments_are_removed_for_new_ones(tmp_path, monkeypatch):
    environments = Environments(tmp_path, timeout=60, age=0)
    try:
        for mirror in ("a", "b"):
            monkeypatch.setenv("PIP_INDEX_URL", f"https://{mirror}.example.com/simple")
            environment = await environments.open("m", tmp_path, None, use_venv=True)
            await until(lambda: len(list_entries(tmp_path)) == 1)
            [entry] = list_entries(tmp_path)
            assert environment.launch.readable == (str(entry / "files"),)
            environment.close()
    finally:
        environments.close()
