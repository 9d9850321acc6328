"""The build hook: with TSX_COMPILE=1, a wheel holds the hot path compiled by mypyc.

`TSX_COMPILE=1 python -m build --wheel` builds a wheel for this Python and this platform. Without
the variable, or without a C compiler, the wheel is pure and fits all of them. `scripts/compile
[--remove]` compiles the hot path of this checkout in place, or removes that again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
RUNTIME = ROOT / "runtime"
# the extension that holds the code of all modules; `version.is_compiled` looks for it
LIBRARY = "tsx_runtime.hot_path"
MODULES = (  # docs/concepts/decisions/08-mypyc-modules.md says how they were chosen
    "wire",
    "worker/channel",
    "worker/codecs/requests",
    "worker/codecs/responses",
    "worker/execution/batch",
)
# Packages are not read: that would take minutes, and where a wheel is built they are not there.
CONFIG = """[mypy]
mypy_path = {path}
explicit_package_bases = true
namespace_packages = true
no_site_packages = true
ignore_missing_imports = true
follow_imports = silent
"""


class CompiledHotPath(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        return ["mypy>=1.14", "setuptools"] if self._is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable" or not self._is_wanted():
            return
        self._built = tempfile.TemporaryDirectory()  # until the wheel is written
        try:
            compile_into(Path(self._built.name))
        except NoCompiler as error:
            self.app.display_warning(
                f"{error} This wheel is pure Python: it does the same, and needs more of the processor for each request."
            )
            return
        build_data.update(pure_python=False, infer_tag=True)
        build_data["force_include"] |= {
            str(path): str(path.relative_to(self._built.name))
            for path in extensions(Path(self._built.name))
        }

    def _is_wanted(self) -> bool:
        return os.environ.get("TSX_COMPILE", "") not in ("", "0")


class NoCompiler(Exception):
    """This machine lacks something that compiling needs; the text tells what helps."""


def compile_into(target: Path, modules: Iterable[str] = MODULES) -> None:
    """Write the extensions to the packages, where an import finds them before the modules.

    Raises:
        NoCompiler: This machine cannot compile.
    """
    try:
        from mypyc.build import mypycify  # here, because pure wheels are built without it
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
        from setuptools.errors import BaseError, CCompilerError
    except ImportError as error:
        raise NoCompiler(
            f"The hot path is not compiled: {error}. `pip install mypy setuptools`."
        ) from error
    with tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary, "mypy.ini")
        config.write_text(
            CONFIG.format(
                path=":".join(
                    str(ROOT / room) for room in ("archiver", "runtime", "cli", "templates")
                )
            )
        )
        sources = [str(RUNTIME / "tsx_runtime" / f"{module}.py") for module in modules]
        built = mypycify(
            [f"--config-file={config}", *sources],
            target_dir=temporary,
            group_name=LIBRARY,
            debug_level="0",
        )
        command = build_ext(Distribution({"ext_modules": built}))
        command.build_lib, command.build_temp = str(target), temporary
        command.ensure_finalized()
        try:
            command.run()
        except (BaseError, CCompilerError) as error:
            needs = "It needs a C compiler and the headers of this Python (on Debian: `apt install gcc python3-dev`)."
            raise NoCompiler(f"The hot path is not compiled: {error}. {needs}") from error


def extensions(directory: Path) -> list[Path]:
    return [path for path in directory.glob("tsx_runtime/**/*") if path.suffix in (".so", ".pyd")]


if __name__ == "__main__":
    for path in extensions(RUNTIME):
        path.unlink()
    if "--remove" not in sys.argv:
        try:
            compile_into(RUNTIME)
        except NoCompiler as error:
            sys.exit(str(error))
