"""Imports of an archive's modules: the model's directory is first on sys.path, as in TorchServe.

A module of the archive therefore hides an installed module of the same name, for all code that
imports it later. A module that the worker has imported already keeps its meaning for all code:
`import json` means Python's. The log names both kinds of clash.
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
        """Set the model's directory; only tests set a second one."""
        self.root = root
        self.add(root)

    def add(self, directory: Path) -> None:
        """Make the modules of a directory importable, with priority over all others."""
        if str(directory) in sys.path:
            return
        names = sorted(set(_names_in(directory)))
        loaded = [name for name in names if name in sys.modules]
        hidden = [name for name in names if name not in sys.modules and _is_elsewhere(name)]
        if loaded:
            logger.info(
                "imports of %s load the server's modules, not the archive's modules of the same"
                " names",
                ", ".join(loaded),
            )
        if hidden:
            text = (
                "the archive's modules %s hide installed modules of the same names: rename them if"
                " a library needs those"
            )
            logger.warning(text, ", ".join(hidden))
        sys.path.insert(0, str(directory))

    def import_file(
        self, path: Path, loaded: Callable[[ModuleType, Callable[[], None]], None]
    ) -> ModuleType:
        """Import a file under its own name, or as `tsx_model_NAME` if another module has that name.

        `loaded(module, execute)` executes the module. If it raises, the module is removed again.
        """
        self.add(path.parent)
        name = path.stem
        if name in sys.modules and not _is_from(sys.modules[name], path):
            name = f"tsx_model_{name}"
        if name in sys.modules and _is_from(sys.modules[name], path):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module, execute = importlib.util.module_from_spec(spec), spec.loader.exec_module
        sys.modules[name] = module
        try:
            loaded(module, lambda: execute(module))
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _names_in(directory: Path) -> Iterator[str]:
    """Yield the modules and packages at the top of a directory."""
    try:
        entries = list(os.scandir(directory))
    except OSError:  # An import from this directory fails later.
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


def _is_elsewhere(name: str) -> bool:
    """Tell whether a module of this name is installed or in the standard library."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return name in sys.stdlib_module_names or (spec is not None and spec.loader is not None)


def _is_from(module: ModuleType, path: Path) -> bool:
    return getattr(module, "__file__", None) == str(path)


own_modules = OwnModules()  # The process has one, as it has one sys.modules.
