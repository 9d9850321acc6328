"""Makes `import ts` mean tsx's own carrier of TorchServe's names, in workers and nowhere else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

DIRECTORY = Path(__file__).resolve().parents[1] / "ts"


class ShimFinder:
    """Finds `ts` and what is below it; of a name that is not carried it says so."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "ts":
            return importlib.util.spec_from_file_location("ts", DIRECTORY / "__init__.py", submodule_search_locations=[str(DIRECTORY)])
        if not fullname.startswith("ts."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None:
            raise ModuleNotFoundError(
                f"tsx does not carry TorchServe's module {fullname!r}. It carries: {', '.join(carried())}", name=fullname
            )
        return spec


def install() -> None:
    """Before any other finder, so that it also holds where TorchServe itself is installed. A second call changes nothing."""
    if not any(finder is ShimFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, ShimFinder)


def carried() -> list[str]:
    """The names of all modules that can be imported from `ts`."""
    files = (path.relative_to(DIRECTORY.parent).with_suffix("") for path in DIRECTORY.rglob("*.py") if path.name != "__init__.py")
    return sorted(".".join(path.parts) for path in files)
