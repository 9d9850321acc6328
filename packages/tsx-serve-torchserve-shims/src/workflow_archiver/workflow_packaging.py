"""`package_workflow` for scripts, and the entry point of torch-workflow-archiver."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path

from tsx_archiver.workflow import command
from tsx_archiver.workflow.packing import write_workflow_archive

_log = logging.getLogger(__name__)


def package_workflow(args: Namespace, manifest: str | None = None) -> None:
    """Pack a workflow.

    Args:
        args: The flags of torch-workflow-archiver.
        manifest: Ignored; TorchServe's scripts pass it.
    """
    force = bool(getattr(args, "force", False))
    write_workflow_archive(
        command.spec_of(args),
        Path(getattr(args, "export_path", None) or "."),
        force=force,
        warn=_log.warning,
    )


def generate_workflow_archive() -> None:
    """Act as the command torch-workflow-archiver, and exit."""
    sys.exit(command.main())
