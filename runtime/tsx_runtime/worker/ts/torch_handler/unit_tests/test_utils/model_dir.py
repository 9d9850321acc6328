"""`ts.torch_handler.unit_tests.test_utils.model_dir`: files for unit tests of a handler, outside of a server."""

import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

__all__ = ["copy_files", "download_model"]

TIMEOUT = 60  # seconds without a byte


def copy_files(src_dir: str | Path, dst_dir: str | Path, files: Mapping[str, str]) -> None:
    """`files` has the name in `dst_dir` for each name in `src_dir`."""
    for source, target in files.items():
        shutil.copy(Path(src_dir) / source, Path(dst_dir) / target)


def download_model(model_url: str, model_dir: str | Path) -> None:
    """The file behind an http or https address, under its own name; one that is there already is kept."""
    parts = urlsplit(model_url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{model_url!r} is no http or https address")
    target = Path(model_dir) / PurePosixPath(parts.path).name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.part")
        with urllib.request.urlopen(model_url, timeout=TIMEOUT) as answer, partial.open("wb") as file:
            shutil.copyfileobj(answer, file)
        partial.replace(target)
