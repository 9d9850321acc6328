"""`Model`, the entry `model` of a manifest."""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A model's name, version and files, without the directories of the files."""

    model_name: str
    serialized_file: str | None
    handler: str
    model_file: str | None = None
    model_version: str | None = None
    extensions: Any = None
    requirements_file: str | None = None
    config_file: str | None = None

    @property
    def model_dict(self) -> dict[str, Any]:
        """The entry in the form of a manifest."""
        entries = {
            re.sub("_(.)", lambda match: match[1].upper(), name): value
            for name, value in self._asdict().items()
            if value
        }
        files = (name for name in entries if "File" in name or name == "handler")
        return entries | {name: PurePath(entries[name]).name for name in files}

    def __repr__(self) -> str:
        return json.dumps(self.model_dict)
