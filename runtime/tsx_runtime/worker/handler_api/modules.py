"""The import of an archive's modules, whose directory is first on sys.path, as in TorchServe.

Therefore a module of the archive hides an installed module of the same name, for all code that
imports it later. This does not apply to modules that the worker has imported already: `import json`
still imports Python's module. The log reports both kinds of conflict.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import all_suffixes
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("tsx.worker")


class OwnModules:
    """The modules of the one model that a process serves."""

    def __init__(self) -> None:
        self.root: Path | None = None  # the model's directory

    def enter(self, root: Path) -> None:
        """Set the model's directory. Only tests call this more than once."""
        self.root = root
        self.add(root)

    def add(self, directory: Path) -> None:
        """Make the modules of a directory importable, with priority over installed modules."""
        if str(directory) in sys.path:
            return
        names = sorted(set(_names_in(directory)))
        imported_names = [name for name in names if name in sys.modules]
        hiding_names = [name for name in names if name not in sys.modules and _is_installed(name)]
        if imported_names:
            logger.info(
                "imports of %s load the server's modules, not the archive's modules of the same"
                " names",
                ", ".join(imported_names),
            )
        if hiding_names:
            text = (
                "the archive's modules %s hide installed modules of the same names: rename them if"
                " a library needs those"
            )
            logger.warning(text, ", ".join(hiding_names))
        sys.path.insert(0, str(directory))

    def import_file(
        self, path: Path, run_import: Callable[[ModuleType, Callable[[], None]], None]
    ) -> ModuleType:
        """Import a file under its own name, or as `tsx_model_NAME` if another module has that name.

        `run_import(module, execute)` must call `execute`. If it raises, the module is removed
        again.
        """
        self.add(path.parent)
        name = path.stem
        if name in sys.modules and not _is_loaded_from(sys.modules[name], path):
            name = f"tsx_model_{name}"
        if name in sys.modules and _is_loaded_from(sys.modules[name], path):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module, execute = importlib.util.module_from_spec(spec), spec.loader.exec_module
        sys.modules[name] = module
        try:
            run_import(module, lambda: execute(module))
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _names_in(directory: Path) -> Iterator[str]:
    """Yield the modules and packages at the top of a directory."""
    try:
        entries = list(os.scandir(directory))
    except OSError:  # The directory cannot be read, so that a later import reports the error.
        return
    for entry in entries:
        if entry.is_dir():
            if (Path(entry) / "__init__.py").is_file():
                yield entry.name
            continue
        suffix = next((suffix for suffix in all_suffixes() if entry.name.endswith(suffix)), None)
        name = entry.name.removesuffix(suffix or "")
        if suffix and name.isidentifier():
            yield name


def _is_installed(name: str) -> bool:
    """Tell whether a module of this name is installed or in the standard library."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return name in sys.stdlib_module_names or (spec is not None and spec.loader is not None)


def _is_loaded_from(module: ModuleType, path: Path) -> bool:
    return getattr(module, "__file__", None) == str(path)


own_modules = OwnModules()  # A process has only one, since it has only one sys.modules.
