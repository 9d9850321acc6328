"""The .war archive of a workflow: its specification, functions and manifest."""

from tsx_archiver.workflow.opening import OpenWorkflow, WorkflowManifest, open_workflow
from tsx_archiver.workflow.packing import WorkflowArchiveSpec, write_workflow_archive
from tsx_archiver.workflow.spec import (
    SEPARATOR,
    CycleInSpec,
    InvalidSpec,
    Node,
    NodeSettings,
    WorkflowSpec,
    find_cycle,
    leaves_of,
    normalized_edges,
    parents_of,
    parse_spec,
    read_spec,
)

__all__ = [
    "SEPARATOR",
    "CycleInSpec",
    "InvalidSpec",
    "Node",
    "NodeSettings",
    "OpenWorkflow",
    "WorkflowArchiveSpec",
    "WorkflowManifest",
    "WorkflowSpec",
    "find_cycle",
    "leaves_of",
    "normalized_edges",
    "open_workflow",
    "parents_of",
    "parse_spec",
    "read_spec",
    "write_workflow_archive",
]
