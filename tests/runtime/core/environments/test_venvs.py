"""Packages of a model's own, with real pip, real wheels and real workers; no package index is
asked.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.clients.talker import ask, gone, order, talker, until
from tests.support.models import make_model
from tests.support.wheels import make_wheel
from tsx_runtime.core.environments.requirements import read_requirements
from tsx_runtime.core.environments.venvs import Environments, key_of
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import InvalidModel
from tsx_runtime.settings.schema import Settings

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
# A package whose build says where it is, and does not end.
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


def model(
    directory: Path,
    requirements: str,
    *,
    handler: str = HANDLER,
    config: str = "",
    wheels: bool = True,
) -> Path:
    make_model(directory, handler, config=config)
    manifest = directory / "MAR-INF" / "MANIFEST.json"
    reported = json.loads(manifest.read_text())
    reported["model"]["requirementsFile"] = "requirements.txt"
    manifest.write_text(json.dumps(reported))
    (directory / "requirements.txt").write_text(requirements)
    if wheels:
        make_wheel(directory / "wheels", "iniconfig", "99.0")
    return directory


def hanging(directory: Path, note: Path) -> Path:
    model(directory, "./slow\n", wheels=False)
    (directory / "slow").mkdir()
    (directory / "slow" / "backend.py").write_text(HANGING.format(note=str(note)))
    (directory / "slow" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "slow"\nversion = "1"\n'
    )
    return directory


def served(test, cache: Path, **settings) -> None:
    async def main():
        registry = Registry(Settings(cache_dir=cache, install_py_dep_per_model=True, **settings))
        try:
            await test(registry)
        finally:
            await registry.close()

    asyncio.run(main())


def built(cache: Path) -> list[Path]:
    return list((cache / "environments" / "entries").iterdir())


def test_models_that_ask_alike_share_one_environment_and_get_their_own_packages_first(
    tmp_path, caplog
):
    """Two at once, one of them with an interpreter of its own; what the server has already is not
    installed again.
    """
    caplog.set_level("INFO", "tsx.environments")
    cache = tmp_path / "cache"
    one = model(tmp_path / "one", "iniconfig==99.0\npsutil\n")
    two = model(tmp_path / "two", "iniconfig==99.0\npsutil\n", config="useVenv: true\n")

    async def test(registry):
        versions = await asyncio.gather(
            registry.register_path(one, order()), registry.register_path(two, order())
        )
        first, second = [json.loads(await ask(version, "")) for version in versions]
        [entry] = built(cache)
        for reported in (first, second):
            assert reported["version"] == "99.0"
            assert Path(reported["file"]).is_relative_to(entry / "files")
            assert reported["psutil"] == psutil.__file__
        assert (first["prefix"], first["environment"]) == (sys.prefix, None)
        assert second["prefix"] == second["environment"] == str(entry / "files")
        assert second["script"] == "99.0\n"
        assert (
            len(
                [
                    record
                    for record in caplog.records
                    if "its environment is ready" in record.message
                ]
            )
            == 1
        )
        assert any(
            "pip: Successfully installed iniconfig-99.0" in record.message
            for record in caplog.records
        )
        pid = versions[0].workers[0].pid
        await registry.unregister("one")
        assert not psutil.pid_exists(pid)

    served(test, cache)


def test_a_failed_installation_is_reported_in_pips_words_and_leaves_nothing(tmp_path):
    cache = tmp_path / "cache"
    directory = model(tmp_path / "m", "no-such-package==1.0\n")

    async def test(registry):
        with pytest.raises(InvalidModel) as failure:
            await registry.register_path(directory, order())
        first, *rest = failure.value.message.splitlines()
        assert first == "Custom pip package installation failed for model m"
        assert "ERROR: No matching distribution found for no-such-package==1.0" in rest
        assert (failure.value.status, failure.value.type) == (400, "ModelException")
        assert not registry.models
        assert built(cache) == list((cache / "environments" / "partial").iterdir()) == []
        assert (
            await ask(await registry.register_path(talker(tmp_path / "other"), order()), "hello")
            == "hello"
        )

    served(test, cache)


def test_requirements_that_pip_must_not_see_are_refused_before_it_is_started(tmp_path):
    directory = model(tmp_path / "m", "iniconfig; $(touch here)\n")

    async def test(registry):
        with pytest.raises(
            InvalidModel,
            match=r"installation failed for model m\nline 1 of requirements.txt, .* it is not a requirement",
        ):
            await registry.register_path(directory, order())
        assert not (directory / "here").exists()

    served(test, tmp_path / "cache")


def test_an_installation_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    note = tmp_path / "note"

    async def test(registry):
        with pytest.raises(InvalidModel, match="stopped after install_timeout"):
            await registry.register_path(hanging(tmp_path / "m", note), order())
        if note.exists() and (pid := note.read_text()):  # on a slow machine pip has not come so far
            await until(lambda: gone(int(pid)))

    served(test, tmp_path / "cache", install_timeout=2)


async def test_others_are_served_while_a_model_is_installed_and_a_stop_ends_it(tmp_path):
    note = tmp_path / "note"

    registry = Registry(Settings(cache_dir=tmp_path / "cache", install_py_dep_per_model=True))
    installing = asyncio.create_task(registry.register_path(hanging(tmp_path / "m", note), order()))
    other = await registry.register_path(talker(tmp_path / "other"), order())
    await until(lambda: note.exists() and note.read_text())
    assert await ask(other, "hello") == "hello"
    await registry.close()
    with pytest.raises(InvalidModel):
        await installing
    await until(lambda: gone(int(note.read_text())))


def test_without_the_setting_nothing_is_installed_and_it_is_said(tmp_path, caplog):
    directory = model(
        tmp_path / "m",
        "no-such-package\n",
        handler="def handle(data, context):\n    return data and ['served']\n",
    )

    async def main():
        registry = Registry(Settings(cache_dir=tmp_path / "cache"))
        try:
            assert await ask(await registry.register_path(directory, order()), "") == "served"
        finally:
            await registry.close()

    asyncio.run(main())
    assert (
        "the packages of requirements.txt are not installed, since install_py_dep_per_model is false"
        in caplog.text
    )


def test_the_key_is_of_all_that_decides_what_is_installed(tmp_path, monkeypatch):
    one = key_of(read_requirements(model(tmp_path / "a", "iniconfig\n"), "requirements.txt"))
    assert (
        key_of(read_requirements(model(tmp_path / "b", "iniconfig\n"), "requirements.txt")) == one
    )
    assert (
        key_of(read_requirements(model(tmp_path / "c", "iniconfig==99.0\n"), "requirements.txt"))
        != one
    )
    make_wheel(tmp_path / "b" / "wheels", "iniconfig", "99.1")
    assert key_of(read_requirements(tmp_path / "b", "requirements.txt")) != one
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example.com/simple")
    assert key_of(read_requirements(tmp_path / "a", "requirements.txt")) != one


async def test_environments_that_nobody_uses_make_room_for_others(tmp_path):
    environments = Environments(tmp_path / "cache", timeout=60, age=0)
    try:
        for name in ("a", "b"):
            directory = model(tmp_path / name, "iniconfig==99.0\n", config=f"n: {name}\n")
            make_wheel(directory / "wheels", f"only_{name}", "1.0")
            opened = await environments.open(name, directory, "requirements.txt")
            await until(lambda: len(built(tmp_path / "cache")) == 1)
            assert opened.directory.exists()
            opened.close()
    finally:
        environments.close()
