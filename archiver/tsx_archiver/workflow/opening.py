"""The opening of a .war or a directory as a workflow, whose specification is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tsx_archiver.containers.base import ArchiveFile
from tsx_archiver.errors import CannotOpen, ForeignFile, InvalidManifest
from tsx_archiver.limits import MAX_MANIFEST_BYTES, Limits
from tsx_archiver.metadata.manifest import (
    CHECKSUMS_KEY,
    handler_fault,
    read_manifest_json,
    split_handler,
)
from tsx_archiver.names import is_model_name, path_fault, shown
from tsx_archiver.opening import (
    LockedDirectory,
    is_directory,
    model_root,
    open_source,
    refuse_foreign_link,
    unpack_file,
)
from tsx_archiver.storage.cache import Cache
from tsx_archiver.workflow.spec import WorkflowSpec, read_spec

WORKFLOW_MANIFEST_PATH = "WAR-INF/MANIFEST.json"


@dataclass
class OpenWorkflow(LockedDirectory):
    """An open workflow, whose directory is kept until it is closed.

    Attributes:
        source: The path of the archive.
        directory: The directory of its files.
        manifest: The manifest.
        handler: The path inside `directory` of the file with the nodes' functions, or None.
        spec: The specification.
        problems: Warnings about settings that will probably not do what the author meant.
    """

    source: Path
    directory: Path
    manifest: WorkflowManifest
    handler: str | None
    spec: WorkflowSpec
    problems: list[str] = field(default_factory=list)


def open_workflow(
    source: Path,
    *,
    cache: Path | Cache | None = None,
    limits: Limits = Limits(),  # noqa: B008  # an immutable tuple
) -> OpenWorkflow:
    """Open a .war, detected by its bytes, or a directory, like `open_archive`.

    Raises:
        InvalidSpec: The specification cannot be used.
        CycleInSpec: The graph of the workflow has a cycle.
        ArchiveError: The archive is missing, damaged, unsafe or too large.
    """
    source = Path(source)
    if is_directory(source):
        return _open_directory(source, source)
    with open_source(source) as file:
        entry, _ = unpack_file(
            file,
            source,
            cache,
            limits,
            lambda container, root: _read_checksums(container, root, source),
        )
    try:
        workflow = _open_directory(entry.files, source)
    except BaseException:
        entry.lock.close()
        raise
    workflow._lock = entry.lock
    return workflow


def _read_checksums(container: ArchiveFile, root: str, source: Path) -> Mapping[str, str]:
    content = container.read(
        f"{root}/{WORKFLOW_MANIFEST_PATH}" if root else WORKFLOW_MANIFEST_PATH, MAX_MANIFEST_BYTES
    )
    if content is None:
        raise _not_a_workflow(source)
    return parse_workflow_manifest(content, source=str(source)).checksums


def _open_directory(directory: Path, source: Path) -> OpenWorkflow:
    try:
        root = model_root(directory)
        refuse_foreign_link(root, directory, source)
        path = root / WORKFLOW_MANIFEST_PATH
        refuse_foreign_link(path, root, source)
        if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _not_a_workflow(source)
        manifest = parse_workflow_manifest(path.read_bytes(), source=str(source))
        handler = _handler_file(root, manifest, source)
        if not (root / manifest.spec_file).is_file():
            raise InvalidManifest(
                f"{source}: the manifest names specFile {manifest.spec_file}, which the archive"
                " does not contain."
            )
        refuse_foreign_link(root / manifest.spec_file, root, source)
        spec = read_spec(root / manifest.spec_file, has_handler=handler is not None)
    except OSError as error:
        raise CannotOpen(
            f"{error.filename} cannot be read ({error.strerror}). Check its permissions."
        ) from error
    return OpenWorkflow(source, root.absolute(), manifest, handler, spec, list(spec.problems))


def _handler_file(root: Path, manifest: WorkflowManifest, source: Path) -> str | None:
    if manifest.handler is None:
        return None
    name = split_handler(manifest.handler)[0]
    name = name if name.endswith(".py") else f"{name}.py"
    refuse_foreign_link(root / name, root, source)
    if not (root / name).is_file():
        raise InvalidManifest(
            f"{source}: the manifest names handler {shown(name)}, which the archive does not"
            " contain. Pack it again."
        )
    return name


def _not_a_workflow(source: Path) -> ForeignFile:
    return ForeignFile(
        f"{source} is not a workflow archive: it holds no {WORKFLOW_MANIFEST_PATH}. Pack one with"
        " torch-workflow-archiver."
    )


@dataclass(frozen=True)
class WorkflowManifest:
    """A checked manifest; `data` is the content of the file."""

    workflow_name: str
    spec_file: str
    handler: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each member by name; empty for an archive of another archiver."""
        return dict(self.data.get(CHECKSUMS_KEY) or {})


def parse_workflow_manifest(content: bytes, *, source: str) -> WorkflowManifest:
    """Parse a manifest.

    Raises:
        InvalidManifest: The manifest cannot be used; the message names `source`.
    """
    try:
        data = read_manifest_json(content)
    except ValueError as error:
        raise _invalid_manifest(source, f"is not JSON ({error})") from error
    workflow = data.get("workflow") if isinstance(data, dict) else None
    if not isinstance(workflow, dict):
        raise _invalid_manifest(source, "has no object called workflow")
    checksums = data.get(CHECKSUMS_KEY)
    if checksums is not None and not (
        isinstance(checksums, dict) and all(isinstance(value, str) for value in checksums.values())
    ):
        raise _invalid_manifest(source, f"has a {CHECKSUMS_KEY} that is not an object of strings")
    name, spec, handler = (
        _checked_text(workflow, key, source) for key in ("workflowName", "specFile", "handler")
    )
    if not name or not is_model_name(name):
        raise _invalid_manifest(
            source,
            f"names the workflow {shown(name or '')}: letters, digits, '_', '-' and '.' only",
        )
    if not spec:
        raise _invalid_manifest(source, "names no specFile")
    return WorkflowManifest(name, spec, handler, data)


def _checked_text(workflow: dict[str, Any], key: str, source: str) -> str | None:
    """Check that the value of a key does not lead out of the directory, and return it."""
    value = workflow.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _invalid_manifest(
            source, f"has a {key} that is a {type(value).__name__}, not a string"
        )
    fault = handler_fault(value) if key == "handler" else path_fault(value)
    if fault:
        raise _invalid_manifest(source, f"has the {key} {shown(value)}, which is refused: {fault}")
    return value


def _invalid_manifest(source: str, fault: str) -> InvalidManifest:
    return InvalidManifest(
        f"{source}: {WORKFLOW_MANIFEST_PATH} {fault}. Pack the workflow again with"
        " torch-workflow-archiver."
    )
