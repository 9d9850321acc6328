"""Fake installed distributions with the metadata that pip writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install_plugins(
    directory: Path, module: str, code: str, groups: Mapping[str, Mapping[str, str]]
) -> None:
    """Install a distribution of one module, with entry points by kind of plugin, then by name."""
    information = directory / f"{module}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = [
        f"[tsx.{group}]\n" + "".join(f"{name} = {target}\n" for name, target in targets.items())
        for group, targets in groups.items()
    ]
    (information / "entry_points.txt").write_text("\n".join(points))
    (directory / f"{module}.py").write_text(code)
