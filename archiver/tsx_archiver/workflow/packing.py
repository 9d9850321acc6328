"""The plan of a .war: its members and its manifest, checked before anything is written."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsx_archiver.errors import CannotPack, InvalidConfig, InvalidModelName
from tsx_archiver.names import is_model_name, shown
from tsx_archiver.packing import Members, PackingPlan, Warn, created_on, extra_paths
from tsx_archiver.workflow.opening import WORKFLOW_MANIFEST_PATH
from tsx_archiver.workflow.spec import WorkflowSpec, read_spec
from tsx_archiver.writing import write_plan

SUFFIX = ".war"


@dataclass(frozen=True)
class WorkflowArchiveSpec:
    """The description of a .war to pack; the fields are the flags of torch-workflow-archiver."""

    workflow_name: str
    spec_file: Path | str
    handler: Path | str | None = None
    extra_files: str | Sequence[Path | str] | None = None


def plan_workflow(spec: WorkflowArchiveSpec, *, warn: Warn) -> PackingPlan:
    """Check a spec and find all its files; `warn` is called for a doubtful detail.

    Raises:
        ArchiveError: The spec cannot be packed.
    """
    if not is_model_name(spec.workflow_name):
        raise InvalidModelName(
            "Workflow name contains special characters.\n"
            r"The allowed regular expression filter for workflow name is:"
            rf" ^[A-Za-z0-9][A-Za-z0-9_\-.]*$ ({shown(spec.workflow_name)})"
        )
    members = Members(WORKFLOW_MANIFEST_PATH)
    workflow: dict[str, Any] = {
        "workflowName": spec.workflow_name,
        "specFile": members.add_file(spec.spec_file, "spec file"),
    }
    if spec.handler:
        workflow["handler"] = members.add_file(spec.handler, "handler")
    for path in extra_paths(spec.extra_files, warn):
        members.add_tree(path)
    _check_spec(spec, warn)
    return PackingPlan(
        spec.workflow_name,
        members.sorted(),
        {"createdOn": created_on(), "workflow": workflow},
        WORKFLOW_MANIFEST_PATH,
    )


def write_workflow_archive(
    spec: WorkflowArchiveSpec, destination: Path, *, force: bool = False, warn: Warn
) -> Path:
    """Pack a .war into the directory `destination`, and return its path."""
    path = Path(destination) / f"{spec.workflow_name}{SUFFIX}"
    write_plan(plan_workflow(spec, warn=warn), path, force=force, kind="workflow")
    return path


def _check_spec(spec: WorkflowArchiveSpec, warn: Warn) -> None:
    """Refuse a specification that the server would refuse."""
    try:
        workflow = read_spec(Path(spec.spec_file), has_handler=bool(spec.handler))
    except InvalidConfig as error:
        raise CannotPack(error.message) from error
    for problem in workflow.problems:
        warn(f"{spec.spec_file}: {problem}")
    if spec.handler:
        _check_functions(workflow, Path(spec.handler), warn)


def _check_functions(spec: WorkflowSpec, handler: Path, warn: Warn) -> None:
    """Warn about nodes that are neither a model nor a function.

    The functions are read from the source instead of by an import, because the modules that it
    imports may exist only on the server.
    """
    try:
        names = _defined_names(ast.parse(handler.read_bytes(), handler.name))
    except (SyntaxError, ValueError) as error:
        raise CannotPack(
            f"{handler} is not valid Python: {error}. Correct it and pack again."
        ) from error
    for name in spec.functions:
        if "*" not in names and name not in names:
            warn(
                f"the node {name} of the dag is neither a model nor a function of {handler.name}:"
                " the server will not load it"
            )


def _defined_names(module: ast.Module) -> set[str]:
    """Return the names that a module defines or imports; `*` stands for a star import."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
