"""Opens a .war or a directory as a workflow's directory, and checks its specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tsx_archiver.containers.base import Container
from tsx_archiver.errors import CannotOpen, ForeignFile, InvalidManifest
from tsx_archiver.limits import MAX_MANIFEST_BYTES, Limits
from tsx_archiver.metadata.manifest import split_handler
from tsx_archiver.names import shown
from tsx_archiver.opening import LockedDirectory, is_directory, model_root, open_source, refuse_foreign_link, unpack_file
from tsx_archiver.workflow.manifest import WORKFLOW_MANIFEST_PATH, WorkflowManifest, parse_workflow_manifest
from tsx_archiver.workflow.spec import WorkflowSpec, read_spec


@dataclass
class OpenWorkflow(LockedDirectory):
    """A workflow that is ready to be registered; `directory` stays as long as this is open.

    `handler` is the file, by its path in `directory`, whose functions are nodes; None where there is none.
    """

    source: Path
    directory: Path
    manifest: WorkflowManifest
    handler: str | None
    spec: WorkflowSpec
    problems: list[str] = field(default_factory=list)


def open_workflow(source: Path, *, cache: Path | None = None, limits: Limits = Limits()) -> OpenWorkflow:  # noqa: B008
    """Open a .war (detected by its bytes, not its name) or a directory with the content of one.

    As for models: everything unsafe is refused before a byte is written, archives are unpacked into `cache`, directories are used
    where they are. Raises ArchiveError; InvalidSpec and CycleInSpec are for the specification.
    """
    source = Path(source)
    if is_directory(source):
        return _open_directory(source, source)
    with open_source(source) as file:
        entry, _ = unpack_file(file, source, cache, limits, lambda container, root: _checksums(container, root, source))
    try:
        opened = _open_directory(entry.files, source)
    except BaseException:
        entry.lock.close()
        raise
    opened._lock = entry.lock
    return opened


def _checksums(container: Container, root: str, source: Path) -> Mapping[str, str]:
    content = container.read(f"{root}/{WORKFLOW_MANIFEST_PATH}" if root else WORKFLOW_MANIFEST_PATH, MAX_MANIFEST_BYTES)
    if content is None:
        raise _no_workflow(source)
    return parse_workflow_manifest(content, source=str(source)).checksums


def _open_directory(directory: Path, source: Path) -> OpenWorkflow:
    try:
        root = model_root(directory)
        refuse_foreign_link(root, directory, source)
        path = root / WORKFLOW_MANIFEST_PATH
        refuse_foreign_link(path, root, source)
        if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _no_workflow(source)
        manifest = parse_workflow_manifest(path.read_bytes(), source=str(source))
        handler = _handler(root, manifest, source)
        if not (root / manifest.spec_file).is_file():
            raise InvalidManifest(f"{source}: the manifest names specFile {manifest.spec_file}, which the archive does not contain.")
        refuse_foreign_link(root / manifest.spec_file, root, source)
        spec = read_spec(root / manifest.spec_file, has_handler=handler is not None)
    except OSError as error:
        raise CannotOpen(f"{error.filename} cannot be read ({error.strerror}). Check its permissions.") from error
    return OpenWorkflow(source, root.absolute(), manifest, handler, spec, list(spec.problems))


def _handler(root: Path, manifest: WorkflowManifest, source: Path) -> str | None:
    if manifest.handler is None:
        return None
    name = split_handler(manifest.handler)[0]
    name = name if name.endswith(".py") else f"{name}.py"
    refuse_foreign_link(root / name, root, source)
    if not (root / name).is_file():
        raise InvalidManifest(f"{source}: the manifest names handler {shown(name)}, which the archive does not contain. Pack it again.")
    return name


def _no_workflow(source: Path) -> ForeignFile:
    return ForeignFile(f"{source} is not a workflow archive: it holds no {WORKFLOW_MANIFEST_PATH}. Pack one with torch-workflow-archiver.")
