"""The files of a small model, and archives with arbitrary members, as an attacker makes them."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tsx_archiver import ArchiveSpec

HANDLER = "def handle(data, context):\n    return None if data is None else ['OK'] * len(data)\n"
MANIFEST = {
    "runtime": "python",
    "model": {"modelName": "tiny", "modelVersion": "1.0", "handler": "handler.py"},
}

MakeZip = Callable[..., Path]
MakeTar = Callable[..., Path]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files of an archive in the current directory."""
    directory = tmp_path / "inputs"
    (directory / "extra" / "sub").mkdir(parents=True)
    (directory / "handler.py").write_text(HANDLER)
    (directory / "model.py").write_text("class Tiny: pass\n")
    (directory / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (directory / "requirements.txt").write_text("numpy\n")
    (directory / "config.yaml").write_text("batchSize: 4\nmaxBatchDelay: 20\n")
    (directory / "extra" / "labels.json").write_text('{"0": "zero"}')
    (directory / "extra" / "sub" / "deep.txt").write_text("deep")
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def spec(inputs: Path) -> ArchiveSpec:
    return ArchiveSpec(
        model_name="tiny",
        version="2.1",
        handler="handler.py",
        serialized_file="weights.bin",
        model_file="model.py",
        extra_files="extra",
        requirements_file="requirements.txt",
        config_file="config.yaml",
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files below a directory by their paths."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def unpacked(cache: Path) -> list[Path]:
    """Return the cache's archive entries, complete or partial."""
    return [
        path for name in ("entries", "partial") for path in (cache / "archives" / name).iterdir()
    ]


@pytest.fixture
def make_zip(tmp_path: Path) -> MakeZip:
    """Return a function that makes a zip of members, whose names may be ZipInfos.

    With `manifest=None` it has neither a manifest nor a handler.
    """

    def make(
        *members: tuple[str | zipfile.ZipInfo, bytes],
        manifest: Mapping[str, object] | None = MANIFEST,
        name: str = "tiny.mar",
    ) -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            if manifest is not None:
                archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
                archive.writestr("handler.py", HANDLER)
            for member, content in members:
                archive.writestr(member, content)
        return path

    return make


@pytest.fixture
def make_tar(tmp_path: Path) -> MakeTar:
    """Return a function that makes a .tar.gz of members, whose names may be TarInfos."""

    def make(
        *members: tuple[str | tarfile.TarInfo, bytes],
        manifest: Mapping[str, object] | None = MANIFEST,
        name: str = "tiny.tar.gz",
    ) -> Path:
        path = tmp_path / name
        default_members: list[tuple[str | tarfile.TarInfo, bytes]] = []
        if manifest is not None:
            default_members = [
                ("tiny/MAR-INF/MANIFEST.json", json.dumps(manifest).encode()),
                ("tiny/handler.py", HANDLER.encode()),
            ]
        with (
            gzip.open(path, "wb") as compressed,
            tarfile.open(fileobj=compressed, mode="w") as archive,
        ):
            for member, content in [*default_members, *members]:
                info = tarfile.TarInfo(member) if isinstance(member, str) else member
                if info.isreg():
                    info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return path

    return make


@pytest.fixture(scope="session")
def peer_bin(processes: None) -> Path:
    """Return the directory of TorchServe's commands, of TSX_PEER_TORCHSERVE or the PATH."""
    configured = os.environ.get("TSX_PEER_TORCHSERVE")
    if configured:
        return Path(configured) / "bin"
    own_scripts = Path(sys.executable).parent
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        if (
            directory
            and Path(directory) != own_scripts
            and (Path(directory) / "torchserve").exists()
            and is_original(Path(directory))
        ):
            return Path(directory)
    pytest.skip("TorchServe is not installed: name its environment in TSX_PEER_TORCHSERVE")


def is_original(directory: Path) -> bool:
    """Tell whether the commands of a directory are TorchServe's and not tsx's."""
    command = directory / "torch-model-archiver"
    return command.exists() and b"model_archiver.model_packaging" in command.read_bytes()
