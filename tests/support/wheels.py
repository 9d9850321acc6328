"""Wheels that pip can install without a package index."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(
    directory: Path, name: str, version: str, source: str = "", *, requires: tuple[str, ...] = ()
) -> Path:
    """Make a wheel of one module, `name`.py."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    members = {
        f"{name}.py": source or f"VERSION = {version!r}\n\n\ndef main():\n    print(VERSION)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\nrun-{name} = {name}:main\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in members.items():
            # A ZipInfo has a fixed time, so the bytes are always the same.
            wheel.writestr(zipfile.ZipInfo(member), text)
        wheel.writestr(
            zipfile.ZipInfo(f"{info}/RECORD"),
            "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"]),
        )
    return path
