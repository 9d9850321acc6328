"""Imports of an archive's own modules: its handler finds them, and they replace no module of other code.

TorchServe puts the model's directory first on sys.path, so a `yaml.py` or `typing.py` of an archive replaces that module for the server's
code and its libraries as well, wherever these import it later. Here the directory comes last on sys.path: a module whose name nothing
else has (`utils`, `preprocess`) is found by all code under its own name, and so by pickles.

A name that something else has, installed or in the standard library, is `private`: the archive's files, and only they, get the archive's
module for it, which is kept as `tsx_model.NAME`. For that the archive's files are executed with an `__import__` of their own, which their
functions have as well, whenever they import. What the server has imported before the handler keeps its meaning for all code, as in
TorchServe: `import json` means Python's.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
    all_suffixes,
)
from pathlib import Path
from types import ModuleType
from typing import Any

ALIAS = "tsx_model"
PRELOADED = ("numpy", "PIL", "torch")  # by the fork server; where there is none, they mean the same

logger = logging.getLogger("tsx.worker")


class OwnModules:
    """The modules of the one model that a process serves."""

    def __init__(self) -> None:
        self.root: Path | None = None  # the model's directory
        self.private: set[str] = set()
        self._directories: list[str] = []  # the root, and those of modules that were imported by their path
        self._builtins: dict[str, Any] = {}

    def enter(self, root: Path) -> None:
        """Set the model's directory; only tests set a second one."""
        for name in [name for name in sys.modules if name.partition(".")[0] == ALIAS]:
            del sys.modules[name]
        self.root, self.private = root, set()
        self._directories = []
        self.add(root)

    def add(self, directory: Path) -> None:
        """Make the modules of a directory importable, after all others."""
        place = str(directory)
        if place in self._directories:
            return
        self._directories.append(place)
        names = set(_names_in(directory))
        self._tell_hidden(sorted(name for name in names if self._is_taken(name)))
        private = {name for name in names if not self._is_taken(name) and name not in sys.modules and _is_elsewhere(name)}
        if private:
            self.private |= private
            self._install()
        if place not in sys.path:
            sys.path.append(place)

    def import_file(self, path: Path, loaded: Callable[[ModuleType, Callable[[], None]], None]) -> ModuleType:
        """The module of a file, under the file's own name unless that is another module's.

        `loaded(module, execute)` executes it; where that raises, nothing is left of it.
        """
        self.add(path.parent)
        name = path.stem
        before = sys.modules.get(name)
        if name in self.private or (before is not None and not _is_from(before, path)):
            self._make_alias()
            name = f"{ALIAS}.{name}"
            before = sys.modules.get(name)
        if before is not None and _is_from(before, path):
            return before
        loader = _OwnLoader(name, str(path), self._builtins) if self.private else SourceFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            loaded(module, lambda: loader.exec_module(module))
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def spelled(self, name: str) -> str:
        """The name under which the archive's module of a dotted name is imported."""
        return f"{ALIAS}.{name}" if name.partition(".")[0] in self.private else name

    def _is_taken(self, name: str) -> bool:
        """Whether the server has imported another module of that name, so that it keeps its meaning for all code."""
        known = sys.modules.get(name)
        file = getattr(known, "__file__", None)
        return name in PRELOADED or (known is not None and not (file and any(_is_below(file, place) for place in self._directories)))

    def _tell_hidden(self, names: Sequence[str]) -> None:
        if names:
            logger.info("imports of %s load the server's modules, not the archive's modules of the same names", ", ".join(names))

    def _install(self) -> None:
        """Installed once there is a private module: archives without such names have no cost."""
        self._make_alias()
        if self._builtins:
            return
        self._builtins = {**vars(builtins), "__import__": self._import}
        sys.path_hooks.insert(0, self._finder)
        sys.path_importer_cache.clear()
        real = importlib.import_module

        def import_module(name: str, package: str | None = None) -> ModuleType:
            own = sys._getframe(1).f_builtins is self._builtins
            return real(self.spelled(name) if own else name, package)

        importlib.import_module = import_module

    def _make_alias(self) -> None:
        if ALIAS not in sys.modules:
            package = ModuleType(ALIAS, "The archive's modules whose names other modules have.")
            package.__path__ = self._directories
            package.__spec__ = ModuleSpec(ALIAS, None, is_package=True)
            sys.modules[ALIAS] = package

    def _finder(self, place: str) -> FileFinder:
        """A path hook."""
        if not any(_is_below(place, directory) for directory in self._directories):
            raise ImportError("not of the archive", path=place)
        own = self._builtins

        class Loader(_OwnLoader):
            def __init__(self, fullname: str, path: str) -> None:
                super().__init__(fullname, path, own)

        kinds = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (Loader, SOURCE_SUFFIXES), (SourcelessFileLoader, BYTECODE_SUFFIXES))
        return FileFinder(place, *((kind, list(suffixes)) for kind, suffixes in kinds))

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """`__import__` of the archive's files."""
        if level or name.partition(".")[0] not in self.private:
            return builtins.__import__(name, globals, locals, fromlist, level)
        found = builtins.__import__(f"{ALIAS}.{name}", globals, locals, fromlist, 0)
        return found if fromlist else sys.modules[f"{ALIAS}.{name.partition('.')[0]}"]


class _OwnLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, own: dict[str, Any]) -> None:
        super().__init__(fullname, path)
        self._own = own

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._own
        super().exec_module(module)


def _names_in(directory: Path) -> Iterator[str]:
    """The modules and packages at the top of a directory."""
    try:
        entries = list(os.scandir(directory))
    except OSError:  # an import from it fails then
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
    """Whether something else is found under the name. A directory without an __init__.py gives way to any module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return name in sys.stdlib_module_names or (spec is not None and spec.loader is not None)


def _is_from(module: ModuleType, path: Path) -> bool:
    return getattr(module, "__file__", None) == str(path)


def _is_below(file: str, directory: str) -> bool:
    return file == directory or file.startswith(directory.rstrip(os.sep) + os.sep)


own_modules = OwnModules()  # what is imported is the process's, and so is this
