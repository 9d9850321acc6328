"""`WorkflowExportUtils.generate_manifest_json` and constants for scripts that pack workflows."""

from __future__ import annotations

import json
import logging
from argparse import Namespace

from tsx_archiver.workflow import command
from tsx_archiver.workflow.opening import WORKFLOW_MANIFEST_PATH
from tsx_archiver.workflow.packing import plan_workflow

WAR_INF, _, MANIFEST_FILE_NAME = WORKFLOW_MANIFEST_PATH.partition("/")
_log = logging.getLogger(__name__)


class WorkflowExportUtils:
    @staticmethod
    def generate_manifest_json(args: Namespace) -> str:
        return json.dumps(
            plan_workflow(command.spec_of(args), warn=_log.warning).manifest, indent=2
        )
