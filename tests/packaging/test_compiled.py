"""The hot path compiled with mypyc, in wheels that are built with TSX_COMPILE=1."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tsx_runtime.version import __version__

ROOT = Path(__file__).parents[2]
PRINT_VERSION = """
from tsx_cli.main import main
from tsx_runtime import wire
print(wire.__file__, wire.encode(wire.Kind.PING, 7))
main(["--version"])
"""


@pytest.fixture(scope="module")
def hatch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_data(hatch_build: ModuleType, version: str) -> tuple[list[str], dict[str, Any]]:
    """Return the packages that a build needs, and the data of its wheel."""
    data: dict[str, Any] = {"pure_python": True, "infer_tag": False, "force_include": {}}
    hook = hatch_build.CompiledHotPath(str(ROOT), {}, None, None, "", "wheel")
    hook.initialize(version, data)
    return hook.dependencies(), data


def test_a_wheel_is_pure_and_needs_no_compiler_unless_the_variable_is_set(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build, "compile_into", None)
    monkeypatch.delenv("TSX_COMPILE", raising=False)
    pure = {"pure_python": True, "infer_tag": False, "force_include": {}}
    assert build_data(hatch_build, "standard") == ([], pure)
    monkeypatch.setenv("TSX_COMPILE", "1")
    assert build_data(hatch_build, "editable")[1] == pure


def test_a_compiled_wheel_holds_the_extensions_for_this_python(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_into(target: Path) -> None:
        (target / "tsx_runtime" / "worker").mkdir(parents=True)
        (target / "tsx_runtime" / "worker" / "channel.so").touch()

    monkeypatch.setattr(hatch_build, "compile_into", compile_into)
    monkeypatch.setenv("TSX_COMPILE", "1")
    needs, data = build_data(hatch_build, "standard")
    assert [need.partition(">")[0] for need in needs] == ["mypy", "setuptools"]
    assert (data["pure_python"], data["infer_tag"], list(data["force_include"].values())) == (
        False,
        True,
        ["tsx_runtime/worker/channel.so"],
    )


def test_the_wheel_is_pure_with_a_warning_if_there_is_no_compiler(
    hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_into(target: Path) -> None:
        raise hatch_build.NoCompiler("There is no cc.")

    monkeypatch.setattr(hatch_build, "compile_into", compile_into)
    monkeypatch.setenv("TSX_COMPILE", "1")
    assert build_data(hatch_build, "standard")[1] == {
        "pure_python": True,
        "infer_tag": False,
        "force_include": {},
    }
    output = capsys.readouterr()
    assert "There is no cc. This wheel is pure Python" in " ".join(
        (output.out + output.err).split()
    )


def test_all_modules_to_be_compiled_exist(hatch_build: ModuleType) -> None:
    assert [
        name
        for name in hatch_build.MODULES
        if not (ROOT / "runtime" / "tsx_runtime" / f"{name}.py").is_file()
    ] == []


@pytest.mark.slow
def test_a_compiled_module_equals_the_pure_one_except_for_its_version_text(
    processes: None, tmp_path: Path
) -> None:
    pytest.importorskip("mypyc", reason="mypy is not installed")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if (
        shutil.which(compiler) is None
        or not Path(sysconfig.get_path("include"), "Python.h").is_file()
    ):
        pytest.skip("there is no C compiler, or there are no headers of Python")

    def start(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=ROOT,
            env=environment | variables,
        )

    def run(code: str, **variables: str) -> list[str]:
        process = start(code, **variables)
        assert process.returncode == 0, process.stderr
        return process.stdout.splitlines()

    environment = {"PATH": sysconfig.get_path("scripts") + ":/usr/bin:/bin"}
    shutil.copytree(
        ROOT / "runtime" / "tsx_runtime",
        tmp_path / "tsx_runtime",
        ignore=shutil.ignore_patterns("*.so", "*.pyd"),
    )
    pure_file, pure = run(PRINT_VERSION, PYTHONPATH=str(tmp_path))
    assert pure_file.split(" ", 1)[0].endswith("wire.py")
    assert pure == f"tsx {__version__} (pure Python)"
    build = f"import pathlib, hatch_build; hatch_build.compile_into(pathlib.Path({str(tmp_path)!r}), ['wire'])"
    assert "It needs a C compiler" in start(build, CC="no-such-compiler").stderr
    run(build)
    compiled_file, compiled = run(PRINT_VERSION, PYTHONPATH=str(tmp_path))
    assert not compiled_file.split(" ", 1)[0].endswith(".py")
    assert compiled_file.split(" ", 1)[1] == pure_file.split(" ", 1)[1]
    assert compiled == f"tsx {__version__} (compiled)"
