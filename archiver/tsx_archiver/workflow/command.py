"""The `torch-workflow-archiver` command with TorchServe's flags, defaults and messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tsx_archiver.errors import ArchiveError
from tsx_archiver.torch_model_archiver import warn
from tsx_archiver.workflow.packing import SUFFIX, WorkflowArchiveSpec, write_workflow_archive


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="torch-workflow-archiver", description="Torch Workflow Archiver Tool"
    )
    parser.add_argument(
        "--workflow-name",
        required=True,
        help="name of the workflow; the archive is called <name>.war",
    )
    parser.add_argument(
        "--spec-file",
        required=True,
        help="YAML file with the workflow's models and the edges between its nodes (dag)",
    )
    parser.add_argument(
        "--handler", help="Python file with the functions that are nodes of the dag"
    )
    parser.add_argument(
        "--export-path", default=".", help="directory for the archive (default: the current one)"
    )
    parser.add_argument(
        "-f", "--force", action="store_true", help="overwrite an archive of that name"
    )
    parser.add_argument(
        "--extra-files",
        help="comma-separated files, patterns and directories; a directory's content is packed",
    )
    return parser


def spec_of(flags: Any) -> WorkflowArchiveSpec:
    """Convert parsed flags, or an object with the same attributes; optional ones may be missing."""
    return WorkflowArchiveSpec(
        workflow_name=flags.workflow_name,
        spec_file=flags.spec_file,
        handler=getattr(flags, "handler", None) or None,
        extra_files=getattr(flags, "extra_files", None),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    arguments = parser().parse_args(argv)
    path = Path(arguments.export_path) / f"{arguments.workflow_name}{SUFFIX}"
    if arguments.force and path.exists():
        warn(f"Overwriting {path} ...")
    try:
        write_workflow_archive(
            spec_of(arguments), Path(arguments.export_path), force=arguments.force, warn=warn
        )
    except ArchiveError as error:
        print(f"ERROR - {error.message}", file=sys.stderr)
        return 1
    return 0
