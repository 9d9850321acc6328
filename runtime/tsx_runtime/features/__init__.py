"""The optional parts of the server, one folder each; a folder can be removed.

`tsx_runtime.feature` describes what a folder has.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from functools import cache
from types import ModuleType

# The features through which a request passes, the first one first. All others follow by name.
ORDER = ("cache", "recording", "shadows")


@cache
def modules(name: str) -> list[ModuleType]:
    """Import the modules of this name in the folders of all features."""
    folders = [folder.name for folder in pkgutil.iter_modules(__path__)]
    folders.sort(key=lambda folder: (*ORDER, folder).index(folder))
    return [
        importlib.import_module(f"{__name__}.{folder}.{name}")
        for folder in folders
        if importlib.util.find_spec(f"{__name__}.{folder}.{name}") is not None
    ]
