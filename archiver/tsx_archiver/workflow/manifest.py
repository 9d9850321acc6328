"""WAR-INF/MANIFEST.json, the manifest of a workflow's archive (contract 1.6). Unknown fields are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tsx_archiver.errors import InvalidManifest
from tsx_archiver.metadata.manifest import CHECKSUMS_KEY, handler_fault, read_manifest_json
from tsx_archiver.names import is_model_name, path_fault, shown

WORKFLOW_MANIFEST_PATH = "WAR-INF/MANIFEST.json"


@dataclass(frozen=True)
class WorkflowManifest:
    """A checked manifest; `data` is the dict as it stands in the file."""

    workflow_name: str
    spec_file: str
    handler: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def checksums(self) -> dict[str, str]:
        """sha-256 of each member, by its path in the archive; empty where another archiver wrote it."""
        return dict(self.data.get(CHECKSUMS_KEY) or {})


def parse_workflow_manifest(content: bytes, *, source: str) -> WorkflowManifest:
    """Raises InvalidManifest, which names `source`."""
    try:
        data = read_manifest_json(content)
    except ValueError as error:
        raise _invalid(source, f"is not JSON ({error})") from error
    workflow = data.get("workflow") if isinstance(data, dict) else None
    if not isinstance(workflow, dict):
        raise _invalid(source, "has no object called workflow")
    checksums = data.get(CHECKSUMS_KEY)
    if checksums is not None and not (isinstance(checksums, dict) and all(isinstance(value, str) for value in checksums.values())):
        raise _invalid(source, f"has a {CHECKSUMS_KEY} that is not an object of strings")
    name, spec, handler = (_text(workflow, key, source) for key in ("workflowName", "specFile", "handler"))
    if not name or not is_model_name(name):
        raise _invalid(source, f"names the workflow {shown(name or '')}: letters, digits, '_', '-' and '.' only")
    if not spec:
        raise _invalid(source, "names no specFile")
    return WorkflowManifest(name, spec, handler, data)


def _text(workflow: dict[str, Any], key: str, source: str) -> str | None:
    """No name may lead out of the workflow's directory, whatever is later made of it."""
    value = workflow.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _invalid(source, f"has a {key} that is a {type(value).__name__}, not a string")
    fault = handler_fault(value) if key == "handler" else path_fault(value)
    if fault:
        raise _invalid(source, f"has the {key} {shown(value)}, which is refused: {fault}")
    return value


def _invalid(source: str, what: str) -> InvalidManifest:
    return InvalidManifest(f"{source}: {WORKFLOW_MANIFEST_PATH} {what}. Pack the workflow again with torch-workflow-archiver.")
