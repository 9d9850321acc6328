"""Programs whose features lie in a folder of the test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tsx_runtime import features

FEATURES = Path(features.__file__).parent


def feature_names() -> list[str]:
    return sorted(path.parent.name for path in FEATURES.glob("*/__init__.py"))


def with_features(
    directory: Path, names: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Fill a directory with links to features; a program with the result finds only these.

    Its workers and the programs that it starts find no others either.
    """
    directory.mkdir()
    for name in names:
        (directory / name).symlink_to(FEATURES / name)
    customization = directory.with_name(f"{directory.name}-path")
    customization.mkdir()
    (customization / "sitecustomize.py").write_text(
        f"from tsx_runtime import features\nfeatures.__path__[:] = [{str(directory)!r}]\n"
    )
    return {**environment, "PYTHONPATH": str(customization)}
