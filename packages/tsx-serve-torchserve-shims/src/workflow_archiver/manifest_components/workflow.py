"""`Workflow`, the entry `workflow` of a manifest."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any


class Workflow:
    """A workflow's name and files, without the directories of the files, as `workflow_dict`."""

    def __init__(self, workflow_name: str, spec_file: str, handler: str) -> None:
        self.workflow_name = workflow_name
        self.spec_file = PurePath(spec_file).name
        self.handler = PurePath(handler).name
        self.workflow_dict = self.__to_dict__()

    def __to_dict__(self) -> dict[str, Any]:
        return {"workflowName": self.workflow_name, "specFile": self.spec_file, "handler": self.handler}

    def __repr__(self) -> str:
        return json.dumps(self.workflow_dict)
