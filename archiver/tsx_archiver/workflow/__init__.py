"""The .war archive: a workflow's specification, its functions and its manifest, written and opened as models' archives are."""

from .graph import complete, find_cycle, leaves_of, parents_of
from .manifest import WorkflowManifest
from .opening import OpenWorkflow, open_workflow
from .packing import WorkflowArchiveSpec, write_workflow_archive
from .spec import JOINT, CycleInSpec, InvalidSpec, Node, NodeSettings, WorkflowSpec, parse_spec, read_spec

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
