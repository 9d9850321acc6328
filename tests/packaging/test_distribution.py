"""The files in the wheel and the sdist, the installed wheel, and the pinned dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tsx_runtime.version import TORCHSERVE_VERSION, __version__

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
SHIMS = ROOT / "packages" / "tsx-serve-torchserve-shims"
CLIENT = ROOT / "packages" / "tsx-client"
EXTRA_MODULES = [
    "captum",
    "cryptography",
    "google",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "onnx",
    "onnxruntime",
]
PACKAGES = {
    "tsx_archiver": "archiver",
    "tsx_runtime": "runtime",
    "tsx_cli": "cli",
    "tsx_templates": "templates",
}


def run(
    *command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip_install(*arguments: str | Path) -> None:
    run(sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-index")


@pytest.fixture(scope="module")
def dist(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from the sdist."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT)
    return directory


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def shipped_files() -> Iterator[str]:
    """Yield every file of every package by its name in a wheel."""
    for package, folder in PACKAGES.items():
        for file in (ROOT / folder / package).rglob("*"):
            if (
                file.is_file()
                and "__pycache__" not in file.parts
                and file.suffix not in (".so", ".pyd")
            ):  # files that scripts/compile makes
                yield file.relative_to(ROOT / folder).as_posix()


def test_the_wheel_contains_exactly_the_files_of_the_packages(wheel_names: set[str]) -> None:
    packed = {name for name in wheel_names if ".dist-info/" not in name}
    assert packed == set(shipped_files())
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert any(
        name.startswith("tsx_templates/") and not name.endswith((".py", "py.typed"))
        for name in packed
    ), "no templates"


def test_the_wheel_contains_its_licence(wheel: Path, wheel_names: set[str]) -> None:
    licence = next(name for name in wheel_names if name.endswith(".dist-info/licenses/LICENSE"))
    metadata = next(name for name in wheel_names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode().splitlines()


def test_the_sdist_contains_the_files_of_a_checkout(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    required_files = {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "constraints.txt",
        "scripts/test",
        "scripts/demo",
        "examples/digits/digits.pt2",
    }
    assert required_files <= names
    assert {
        f"{folder}/{name}"
        for name in shipped_files()
        for folder in [PACKAGES[name.partition("/")[0]]]
    } <= names
    assert not [name for name in names if name.startswith((".venv", ".demo", ".ci"))]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, and return its scripts directory.

    Its dependencies come from the environment of the tests.
    """
    directory = tmp_path_factory.mktemp("fresh") / "env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", directory], check=True, timeout=120
    )
    python = directory / "bin" / "python"
    pip_install("--python", python, "install", wheel)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", code).strip())
    dependency_paths = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    }  # .pth files in these paths are not read, so tsx is not imported from a checkout
    (site / "borrowed.pth").write_text("\n".join(dependency_paths) + "\n", encoding="utf-8")
    # None makes the import of a module fail.
    hiding_code = f"import sys; sys.modules.update(dict.fromkeys({EXTRA_MODULES}))\n"
    (site / "without_extras.pth").write_text(hiding_code, encoding="utf-8")
    return directory / "bin"


@pytest.mark.parametrize(
    "name", ["tsx", "torchserve", "torch-model-archiver", "torch-workflow-archiver"]
)
def test_installed_commands_print_their_help(
    name: str, installed: Path, tmp_path: Path, user_environment: dict[str, str]
) -> None:
    text = run(installed / name, "--help", cwd=tmp_path, environment=user_environment)
    assert "usage" in text.lower()


def test_the_installed_wheel_packs_serves_and_predicts(
    installed: Path,
    tmp_path: Path,
    user_environment: dict[str, str],
    start_server: Callable[..., Any],
) -> None:
    user_environment["PATH"] = f"{installed}{os.pathsep}{os.environ['PATH']}"
    print_paths = "import tsx_archiver, tsx_cli, tsx_runtime; print(tsx_archiver.__file__, tsx_cli.__file__, tsx_runtime.__file__)"
    files = run(
        installed / "python", "-c", print_paths, cwd=tmp_path, environment=user_environment
    ).split()
    assert all(file.startswith(str(installed.parent)) for file in files)

    extra = [
        "--extra-files",
        DIGITS / "index_to_name.json",
        "--config-file",
        DIGITS / "model-config.yaml",
    ]
    run(
        *(installed / "tsx", "archive", DIGITS / "digits.pth", "--model-file", DIGITS / "model.py"),
        *("--handler", DIGITS / "handler.py", *extra),
        cwd=tmp_path,
        environment=user_environment,
    )
    default_environment = user_environment | {"TSX_ENABLE_GRPC": "true"}  # the product's default
    server = start_server([installed / "tsx", "serve", "digits.mar"], tmp_path, default_environment)
    assert "gRPC is not served: grpc is not installed" in server.log
    answer = run(
        installed / "tsx",
        "predict",
        "digits",
        DIGITS / "images" / "4.png",
        cwd=tmp_path,
        environment=user_environment,
    )
    assert '"four"' in answer.splitlines()[1]
    assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the distribution of the extra `torchserve` and return its directory."""
    directory = tmp_path_factory.mktemp("shims")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", directory, SHIMS)
    pip_install("install", "--target", directory / "site", next(directory.glob("*.whl")))
    return directory / "site"


NAMES_OF_TORCHSERVE = """
import model_archiver, ts
from model_archiver import ModelArchiver, ModelArchiverConfig
from ts import launcher
from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler
print(ts.__version__, launcher.__file__, model_archiver.__file__, BaseHandler.__module__)
"""


def test_torchserves_modules_are_installed_only_with_the_extra(
    installed: Path, shims: Path, tmp_path: Path, user_environment: dict[str, str]
) -> None:
    for name in ("ts", "model_archiver"):
        command = [installed / "python", "-c", f"import {name}"]
        result = subprocess.run(
            command,
            cwd=tmp_path,
            env=user_environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert f"No module named '{name}'" in result.stderr
    environment = {**user_environment, "PYTHONPATH": str(shims)}
    version, launcher, archiver, handler = run(
        installed / "python", "-c", NAMES_OF_TORCHSERVE, cwd=tmp_path, environment=environment
    ).split()
    assert version == TORCHSERVE_VERSION
    assert (launcher, archiver) == (
        str(shims / "ts" / "launcher.py"),
        str(shims / "model_archiver" / "__init__.py"),
    )
    assert handler == "tsx_runtime.worker.handlers.base"


def test_the_three_distributions_have_one_version() -> None:
    shims, client, tsx = (
        (directory / "pyproject.toml").read_text(encoding="utf-8")
        for directory in (SHIMS, CLIENT, ROOT)
    )
    assert f'\nversion = "{__version__}"' in shims
    assert f'\nversion = "{__version__}"' in client
    assert f'"tsx-serve=={__version__}"' in shims
    assert f'torchserve = ["tsx-serve-torchserve-shims=={__version__}"]' in tsx


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_distributions(*requirements: str, skip: re.Pattern[str]) -> set[str]:
    """Return the installed distributions that these requirements need here."""
    pending = [Requirement(text) for text in requirements]
    visited: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement = pending.pop()
        key = (normal(requirement.name), frozenset(requirement.extras))
        if key in visited or skip.match(key[0]):
            continue
        try:
            requires = distribution(requirement.name).requires or []
        except PackageNotFoundError:
            continue  # needed only by other extras or systems
        visited.add(key)
        extras = {"", *requirement.extras}
        pending += [
            inner
            for inner in map(Requirement, requires)
            if inner.marker is None
            or any(inner.marker.evaluate({"extra": name}) for name in extras)
        ]
    return {name for name, _ in visited} - {"tsx-serve"}


def pinned(lines: Iterable[str]) -> dict[str, str]:
    """Return the pinned versions that apply here."""
    pins = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
    return {
        normal(pin.name): str(pin.specifier)[2:]
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def test_constraints_pin_every_tested_package() -> None:
    pins = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    cuda = re.compile(r"nvidia-|cuda-|triton$")  # torch pins these packages itself
    versions = {
        name: distribution(name).version.partition("+")[0]
        for name in required_distributions("tsx-serve[dev,onnx]", "hatchling", skip=cuda)
    }
    assert {name: pins.get(name) for name in versions} == versions


LOCKED = (
    "audio base bench explain gpu grpc keystore lambda onnx openvino otel peft rules transformers"
)


@pytest.mark.parametrize("extra", LOCKED.split())
def test_lock_files_contain_an_images_packages_at_tested_versions(extra: str) -> None:
    cuda = re.compile(r"torch$|nvidia-(?!ml-py)|cuda-|triton$")  # packages from torch's own index
    locks = ROOT / "templates" / "tsx_templates" / "locks"
    texts = [(locks / f"{name}.txt").read_text(encoding="utf-8") for name in ("base", extra)]
    pins = pinned("".join(texts).splitlines())
    versions = {
        name: distribution(name).version
        for name in required_distributions(
            "tsx-serve" if extra == "base" else f"tsx-serve[{extra}]", skip=cuda
        )
    }
    assert {name: pins.get(name) for name in versions} == versions


def test_extras_mentioned_in_messages_and_pages_exist(wheel: Path, wheel_names: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(
            next(name for name in wheel_names if name.endswith(".dist-info/METADATA"))
        ).decode()
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    files = [*(ROOT / folder / package for package, folder in PACKAGES.items()), ROOT / "docs"]
    texts = [
        file.read_text(encoding="utf-8")
        for directory in files
        for pattern in ("*.py", "*.md")
        for file in directory.rglob(pattern)
    ]
    mentioned_extras = {
        extra for text in texts for extra in re.findall(r"tsx-serve\[(\w+)\]", text)
    }
    assert {"onnx", "explain"} <= mentioned_extras <= extras
