"""The facts of a deployment: its archive, read once, and the digest of its image."""

from __future__ import annotations

import ast
import gzip
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsx_archiver import Inspection, inspect_archive, read_member
from tsx_archiver.metadata.compile_settings import needs_compiler
from tsx_archiver.metadata.forms import (
    FORMS_FILE,
    MAX_FILE_BYTES,
    FormIndex,
    FormRecord,
    InvalidForms,
    parse_forms,
)
from tsx_archiver.metadata.huggingface import extras_of
from tsx_archiver.metadata.tabular import EXTRA
from tsx_archiver.metadata.tabular import HANDLER as TABULAR_HANDLER
from tsx_archiver.storage.digest import content_digest
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import archive_limits
from tsx_cli.deploy.engine.resources import Ref, digest
from tsx_cli.deploy.spec import DeploySpec

MAX_TEXT_BYTES = 1 << 20  # limit for files of an archive that are read here


@dataclass(frozen=True)
class Facts:
    """The facts of a deployment about its archive, its image and its location."""

    archive: Path
    sha256: str  # digest of the archive
    model_name: str
    model_version: str
    image: str | Ref  # repository@sha256:..., or a Ref if this deployment builds it
    account: str
    region: str
    requirements: str = ""  # the text of the archive's requirements file
    compiling_part: str = ""  # the part of the archive that compiles C++ on the server, if any
    extras: tuple[str, ...] = ()  # extras of tsx-serve that the model needs in every form
    forms: tuple[FormRecord, ...] = ()  # forms of the archive, in the order of a server's attempts

    @property
    def image_digest(self) -> str:
        """The digest of the image.

        An image that is still to be built has no digest. Its tag, a hash of its content, takes its
        place.
        """
        return (
            self.image.content_id if isinstance(self.image, Ref) else self.image.partition("@")[2]
        )


def read_archive(archive: Path, *, image: str = "", region: str = "") -> tuple[Inspection, Facts]:
    """Read an archive, and return its description and the facts of a deployment.

    Raises:
        ArchiveError: The archive cannot be read.
        CliError: The path is a directory, or the record of forms is invalid.
    """
    if archive.is_dir():
        raise CliError(
            f"{archive} is a directory; only a file can be deployed: pack it with tsx archive"
        )
    inspection = inspect_archive(archive, limits=archive_limits())
    manifest, name = inspection.manifest, inspection.manifest.requirements_file
    requirements = _read_small_member(inspection, name) if name else b""
    with archive.open("rb") as file:
        sha256 = content_digest(file)
    text = requirements.decode("utf-8", "replace")
    forms = kept_forms(inspection)
    compiling_part = _compiling_part(inspection) or next(
        (f"the form {form.name}" for form in forms if form.bound.get("compiles") is True), ""
    )
    needed = {
        EXTRA: manifest.handler == TABULAR_HANDLER,
        "mcp": inspection.config.mcp,
        "monitor": inspection.config.monitor,
    }
    extras = extras_of(manifest.data) + tuple(name for name in needed if needed[name])
    return inspection, Facts(
        archive,
        sha256,
        manifest.model_name,
        manifest.version,
        image,
        "",
        region,
        text,
        compiling_part,
        extras,
        forms,
    )


def kept_forms(inspection: Inspection) -> tuple[FormRecord, ...]:
    """Return the forms of the archive that `forms` of model-config.yaml names.

    Raises:
        CliError: The record of the forms is invalid.
    """
    names = inspection.config.forms or ()
    content = (
        read_member(inspection.source, FORMS_FILE, most=MAX_FILE_BYTES, limits=archive_limits())
        if names
        else None
    )
    try:
        all_forms = FormIndex() if content is None else parse_forms(content)
    except InvalidForms as error:
        raise CliError(f"{inspection.source}: {error}") from error
    return tuple(form for form in map(all_forms.named, names) if form is not None)


def _read_small_member(inspection: Inspection, name: str) -> bytes:
    return read_member(inspection.source, name, most=MAX_TEXT_BYTES, limits=archive_limits()) or b""


def _compiling_part(inspection: Inspection) -> str:
    if needs_compiler(inspection.config.raw.get("pt2")):
        return "pt2 in model-config.yaml"
    sources = [
        member.name
        for member in inspection.members
        if member.name.endswith(".py") and member.size <= MAX_TEXT_BYTES
    ]
    return next(
        (name for name in sources if _calls_compiler(_read_small_member(inspection, name))), ""
    )


def _calls_compiler(source: bytes) -> bool:
    """Tell whether code calls `torch.compile` or AOTInductor, under any of its names."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    names = {node.attr for node in attributes} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }
    torch_attributes = {
        node.attr
        for node in attributes
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    }
    return "compile" in torch_attributes or "aoti_compile_and_package" in names


def tags_of(spec: DeploySpec, facts: Facts) -> dict[str, str]:
    """Return the tags of a deployment.

    Later runs find the deployment by its tags, because there is no other state.
    """
    # The address is left out: two machines may reach a cluster by different addresses.
    ray: Any = {"address"} if spec.target == "ray" else True
    hashed_spec = spec.model_dump(
        mode="json",
        exclude={"model": True, "profile": True, "tags": True, "github": True, "ray": ray},
    )
    return {
        **spec.tags,
        "tsx:name": spec.name,
        "tsx:target": spec.target,
        "tsx:spec-sha": digest(hashed_spec, 16),
        "tsx:model-sha": facts.sha256[:16],
        "tsx:model": f"{facts.model_name}/{facts.model_version}",
        "tsx:image-digest": facts.image_digest,
    }


def owner_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a resource that outlives the version for which it was created."""
    return {key: tags[key] for key in ("tsx:name", "tsx:target")}


def write_model_data(archive: Path, directory: Path) -> Path:
    """Write the `model.tar.gz` that SageMaker requires, which contains the archive.

    The same archive always gives the same bytes.
    """
    path = directory / "model.tar.gz"
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as gzip_file,
        tarfile.open(fileobj=gzip_file, mode="w") as tar,
        archive.open("rb") as content,
    ):
        member = tarfile.TarInfo(archive.name)
        member.size, member.mode = archive.stat().st_size, 0o644
        tar.addfile(member, content)
    return path
