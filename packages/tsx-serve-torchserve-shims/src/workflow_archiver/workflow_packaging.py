"""`package_workflow`, which scripts call with parsed arguments, and the command's own entry
point.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path

from tsx_archiver.workflow import command
from tsx_archiver.workflow.packing import write_workflow_archive

_log = logging.getLogger(__name__)


def package_workflow(args: Namespace, manifest: str | None = None) -> None:
    """Pack. `manifest` is what `WorkflowExportUtils.generate_manifest_json` gave; it says nothing
    that the arguments do not.
    """
    force = bool(getattr(args, "force", False))
    write_workflow_archive(
        command.spec_of(args),
        Path(getattr(args, "export_path", None) or "."),
        force=force,
        warn=_log.warning,
    )


def generate_workflow_archive() -> None:
    sys.exit(command.main())
