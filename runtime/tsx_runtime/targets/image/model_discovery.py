"""The one model that an image has in its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tsx_archiver import ARCHIVE_SUFFIXES
from tsx_runtime.errors import SettingError
from tsx_runtime.targets.image.layout import toolkit_model
from tsx_runtime.targets.server.startup import StartModel, start_model

BASE = "SAGEMAKER_BASE_DIR"
MANIFEST = Path("MAR-INF", "MANIFEST.json")


def model_directory(env: Mapping[str, str]) -> Path:
    """Where an image has its model."""
    return Path(env.get(BASE) or "/opt/ml") / "model"


def found_model(directory: Path, env: Mapping[str, str], name: str | None = None) -> StartModel:
    """The one model of a directory: an archive, what was in one, or the layout of SageMaker's toolkit.

    Raises SettingError, which says what is there instead.
    """
    if (directory / MANIFEST).is_file():
        return start_model(directory, name)
    there = sorted(path for path in directory.iterdir() if not path.name.startswith(".")) if directory.is_dir() else []
    archives = [path for path in there if path.name.endswith(ARCHIVE_SUFFIXES)]
    if len(archives) == 1:
        return start_model(archives[0], name)
    if not archives and there and (laid_out := toolkit_model(directory, env, name or "model")) is not None:
        return laid_out
    what = f"{len(archives)} archives: {_listed(archives)}" if archives else f"no archive, but {_listed(there)}" if there else "nothing"
    wanted = "one .mar, or what is in one (tsx archive unpack), or code/inference.py beside one .pt or .pth"
    raise SettingError(f"{directory} holds {what}; it must hold {wanted}")


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:5])
    return f"{names} and {len(paths) - 5} more" if len(paths) > 5 else names
