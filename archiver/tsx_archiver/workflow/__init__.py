"""The .war archive of a workflow: its specification, functions and manifest."""

from tsx_archiver.workflow.opening import OpenWorkflow, WorkflowManifest, open_workflow
from tsx_archiver.workflow.packing import WorkflowArchiveSpec, write_workflow_archive
from tsx_archiver.workflow.spec import (
    JOINT,
    CycleInSpec,
    InvalidSpec,
    Node,
    NodeSettings,
    WorkflowSpec,
    complete,
    find_cycle,
    leaves_of,
    parents_of,
    parse_spec,
    read_spec,
)

__all__ = [
    "JOINT",
    "CycleInSpec",
    "InvalidSpec",
    "Node",
    "NodeSettings",
    "OpenWorkflow",
    "WorkflowArchiveSpec",
    "WorkflowManifest",
    "WorkflowSpec",
    "complete",
    "find_cycle",
    "leaves_of",
    "open_workflow",
    "parents_of",
    "parse_spec",
    "read_spec",
    "write_workflow_archive",
]
