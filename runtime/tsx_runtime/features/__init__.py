"""The optional parts of the server, one folder each.

Each folder except `torchserve` can be removed. `tsx_runtime.feature` describes the modules of a
folder.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from functools import cache
from types import ModuleType

# The features whose order matters to a request, which passes through the first one first. All
# others follow in the order of their names.
ORDER = ("cache", "recording", "shadows")


@cache
def modules(name: str) -> list[ModuleType]:
    """Import the modules of this name in the folders of all features, and return them."""
    folders = [folder.name for folder in pkgutil.iter_modules(__path__)]
    folders.sort(key=lambda folder: (*ORDER, folder).index(folder))
    return [
        importlib.import_module(f"{__name__}.{folder}.{name}")
        for folder in folders
        if importlib.util.find_spec(f"{__name__}.{folder}.{name}") is not None
    ]
