"""`Manifest`, the content of a model archive's MANIFEST.json."""

from __future__ import annotations

import json
from enum import Enum

from model_archiver.manifest_components.model import Model
from tsx_archiver.packing import created_on
from tsx_archiver.writing import ARCHIVER_VERSION


class RuntimeType(Enum):
    """The language of a handler."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


class Manifest:
    """The content of a MANIFEST.json.

    `manifest_dict` is the content as a dict, and `str()` returns its JSON.
    """

    def __init__(self, runtime: str, model: Model) -> None:
        self.manifest_dict = {
            "createdOn": created_on(),
            "runtime": RuntimeType(runtime).value,
            "model": model.model_dict,
            "archiverVersion": ARCHIVER_VERSION,
        }

    def __repr__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)
