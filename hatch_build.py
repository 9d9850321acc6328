"""The build hook: with TSX_COMPILE=1 a wheel has the hot path compiled by mypyc beside the same modules as Python.

TSX_COMPILE=1 python -m build --wheel    a wheel for this Python and this platform; without the variable it is pure, for all of them
scripts/compile [--remove]               compiles the hot path of this checkout in place, or makes it pure Python again
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
RUNTIME = ROOT / "runtime"
LIBRARY = "tsx_runtime.hot_path"  # the extension that holds the code of all compiled modules
MODULES = (
    "core/scheduling/channel",
    "http/fast_lane/exchange",
    "http/fast_lane/response_heads",
    "wire",
    "worker/channel",
    "worker/codecs/responses",
    "worker/execution/batch",
)  # docs/architecture.md says how they were chosen
OPTIONS = (
    "--config-file=",
    "--no-site-packages",  # which would take minutes to read, and are not there when a wheel is built
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--explicit-package-bases",
    "--namespace-packages",
)


class CompiledHotPath(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        return ["mypy>=1.14", "setuptools"] if self._is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable" or not self._is_wanted():
            return
        self._built = tempfile.TemporaryDirectory()  # until the wheel is written
        compile_into(Path(self._built.name))
        build_data.update(pure_python=False, infer_tag=True)
        build_data["force_include"] |= {str(path): str(path.relative_to(self._built.name)) for path in libraries(Path(self._built.name))}

    def _is_wanted(self) -> bool:
        return os.environ.get("TSX_COMPILE", "0") not in ("", "0")


def compile_into(target: Path) -> None:
    """Put the extensions where the import finds them before the modules: `target` is, or will be, a directory of packages."""
    try:
        from mypyc.build import mypycify  # here, because pure wheels are built without it
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        sys.exit(f"compiling tsx needs mypy and setuptools: pip install mypy setuptools ({error})")
    os.environ["MYPYPATH"] = os.pathsep.join(str(ROOT / room) for room in ("archiver", "runtime", "cli", "templates"))
    with tempfile.TemporaryDirectory() as temporary:
        paths = [str(RUNTIME / "tsx_runtime" / f"{module}.py") for module in MODULES]
        extensions = mypycify([*OPTIONS, *paths], target_dir=temporary, group_name=LIBRARY, debug_level="0")
        command = build_ext(Distribution({"ext_modules": extensions}))
        command.build_lib, command.build_temp = str(target), temporary
        command.ensure_finalized()
        command.run()


def libraries(directory: Path) -> list[Path]:
    return [path for path in directory.glob("tsx_runtime/**/*") if path.suffix in (".so", ".pyd")]


if __name__ == "__main__":
    for path in libraries(RUNTIME):
        path.unlink()
    if "--remove" not in sys.argv:
        compile_into(RUNTIME)
