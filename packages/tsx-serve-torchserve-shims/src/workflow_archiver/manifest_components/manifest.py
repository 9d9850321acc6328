"""`Manifest`, the content of a workflow archive's MANIFEST.json."""

from __future__ import annotations

import json
from typing import Any

from tsx_archiver.packing import created_on
from tsx_archiver.writing import ARCHIVER_VERSION
from workflow_archiver.manifest_components.workflow import Workflow


class Manifest:
    """The content of a MANIFEST.json, as `manifest_dict`; its text is JSON."""

    def __init__(self, workflow: Workflow) -> None:
        self.workflow = workflow
        self.manifest_dict = self.__to_dict__()

    def __to_dict__(self) -> dict[str, Any]:
        return {"createdOn": created_on(), "workflow": self.workflow.workflow_dict, "archiverVersion": ARCHIVER_VERSION}

    def __repr__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)
