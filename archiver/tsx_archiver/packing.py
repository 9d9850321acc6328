"""The plan of an archive: its members and its manifest, checked before anything is written."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tsx_archiver.errors import (
    CannotPack,
    DuplicateInput,
    InputMissing,
    InvalidConfig,
    InvalidModelName,
)
from tsx_archiver.metadata.huggingface import GENERATION_HANDLER, HANDLER
from tsx_archiver.metadata.manifest import CHECKSUMS_KEY, split_handler
from tsx_archiver.metadata.mlmodel import PYFUNC, PYTORCH
from tsx_archiver.metadata.onnx_file import data_files
from tsx_archiver.metadata.tabular import HANDLER as TABULAR_HANDLER
from tsx_archiver.names import (
    DEFAULT_VERSION,
    MANIFEST_PATH,
    collision_key,
    is_model_name,
    path_fault,
    shown,
    similar_file,
)
from tsx_archiver.python_file import HANDLER as PYTHON_FILE
from tsx_archiver.python_file import LITSERVE

BUILTIN_HANDLERS = (
    "base_handler",
    "text_classifier",
    "image_classifier",
    "object_detector",
    "image_segmenter",
    "dali_image_classifier",
    "vllm_handler",
    "trt_llm_handler",
    PYTORCH,
    PYFUNC,
    HANDLER,
    GENERATION_HANDLER,
    PYTHON_FILE,
    TABULAR_HANDLER,
    LITSERVE,
)
RUNTIMES = ("python", "python3", "LSP")
_HANDLER_SUFFIX = {"LSP": ".so"}
CPP_HANDLERS = ("BaseHandler", "TorchScriptHandler")  # built into TorchServe's C++ backend
# Compiled files contain timestamps, so the same sources would give different archives. Python
# compiles the sources again anyway.
_SKIPPED_DIRECTORIES = ("__pycache__",)

Warn = Callable[[str], None]


@dataclass(frozen=True)
class ArchiveSpec:
    """The description of an archive to pack; the fields are the flags of torch-model-archiver.

    Attributes:
        model_name: The name of the model and of the archive.
        handler: The name of a built-in handler, or `path/file.py` or `path/file`, each optionally
            with `:function`.
        version: The version of the model.
        serialized_file: The path of the weights.
        model_file: The path of the model's Python file, optionally with `:Class`.
        extra_files: Paths as a list or separated by commas. Patterns are expanded, and a directory
            stands for its content.
        runtime: `python`, `python3`, or `LSP` for TorchServe's C++ backend.
        requirements_file: The path of a requirements.txt.
        config_file: The path of a model-config.yaml.
        contents: Additional files as bytes, by their names in the archive.
        files: Additional paths, by their names in the archive.
        extra_manifest: Additional keys of the manifest.
    """

    model_name: str
    handler: str
    version: str = DEFAULT_VERSION
    serialized_file: Path | str | None = None
    model_file: Path | str | None = None
    extra_files: str | Sequence[Path | str] | None = None
    runtime: str = "python"
    requirements_file: Path | str | None = None
    config_file: Path | str | None = None
    contents: Mapping[str, bytes] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    extra_manifest: Mapping[str, Any] = field(default_factory=dict)


class PlannedMember(NamedTuple):
    """A file of an archive before it is written."""

    name: str
    source: Path | bytes
    size: int


class PackingPlan(NamedTuple):
    """The members of an archive by name, and its manifest, which still lacks the checksums."""

    model_name: str
    members: list[PlannedMember]
    manifest: dict[str, Any]
    manifest_path: str = MANIFEST_PATH


def plan_archive(spec: ArchiveSpec, *, warn: Warn | None = None) -> PackingPlan:
    """Check a spec and find all its files.

    Args:
        spec: The description of the archive.
        warn: Called for a doubtful detail: a pattern without a match, or a key or value of
            model-config.yaml that the server will not use. Without it, such a detail raises an
            error.

    Raises:
        ArchiveError: The spec cannot be packed.
    """
    _check_names(spec)
    members = Members()
    model: dict[str, Any] = {"modelName": spec.model_name}
    if spec.serialized_file:
        model["serializedFile"] = members.add_file(spec.serialized_file, "serialized file")
    model["handler"] = _add_handler(spec, members)
    if spec.model_file:
        file, class_name = split_handler(str(spec.model_file))
        model["modelFile"] = members.add_file(file, "model file")
        model |= {"modelClass": class_name} if class_name else {}
    model["modelVersion"] = spec.version
    if spec.requirements_file:
        model["requirementsFile"] = members.add_file(spec.requirements_file, "requirements file")
    if spec.config_file:
        model["configFile"] = members.add_file(spec.config_file, "config file")
        check_config(Path(spec.config_file), warn)
    for path in extra_paths(spec.extra_files, warn):
        members.add_tree(path)
    for name, path in spec.files.items():
        members.add(planned_file(name, path), str(path))
    for name, content in spec.contents.items():
        members.add(PlannedMember(name, content, len(content)), f"contents {name}")
    for name, source, _ in members.sorted():
        if isinstance(source, Path) and (
            name.endswith(".onnx") or name == model.get("serializedFile")
        ):
            for location, data_file in data_files(source).items():
                data_name = (PurePosixPath(name).parent / location).as_posix()
                if data_name not in members:
                    if not data_file.exists():
                        text = f"{source} has weights in {location}, but {data_file} does not exist"
                        raise InputMissing(f"{text}. Copy that file there as well.")
                    members.add(planned_file(data_name, data_file), str(data_file))
    manifest = {"createdOn": created_on(), "runtime": spec.runtime, "model": model}
    return PackingPlan(
        spec.model_name, members.sorted(), _merge_manifest(manifest, spec.extra_manifest)
    )


class Members:
    """The members of a plan by their collision keys, each with its origin."""

    def __init__(self, manifest_path: str = MANIFEST_PATH) -> None:
        self._manifest_path = manifest_path
        self._members: dict[str, tuple[PlannedMember, str]] = {}

    def add(self, member: PlannedMember, origin: str) -> None:
        """Add a member.

        Raises:
            CannotPack: The name cannot be used, or another member has it.
        """
        fault = path_fault(member.name)
        if fault:
            raise CannotPack(
                f"{origin}: {shown(member.name)} cannot be a name in an archive: {fault}. Rename"
                " the file."
            )
        key = collision_key(member.name)
        if key == collision_key(self._manifest_path):
            manifest = self._manifest_path
            raise DuplicateInput(
                f"{origin} would overwrite the archive's own {manifest}. Leave it out of the extra"
                " files."
            )
        existing = self._members.get(key)
        if existing is None:
            self._members[key] = (member, origin)
        elif not _same_file(existing[0].source, member.source):
            raise DuplicateInput(
                f"{existing[1]} and {origin} would both be {member.name} in the archive. Rename one"
                " of them."
            )

    def __contains__(self, name: str) -> bool:
        return collision_key(name) in self._members

    def add_file(self, path: Path | str, kind: str) -> str:
        """Add a file without its directories, and return its name in the archive."""
        path = Path(path)
        if path.is_dir():
            raise InputMissing(f"The {kind} {path} is a directory. Name the file in it.")
        if not path.exists():
            raise InputMissing(
                f"The {kind} {path} does not exist{similar_file(path) or '.'} Check the path."
            )
        self.add(planned_file(path.name, path), str(path))
        return path.name

    def add_tree(self, path: Path) -> None:
        """Add a file, or all files below a directory."""
        if not path.is_dir():
            self.add(planned_file(path.name, path), str(path))
            return
        for file in files_below(path):
            self.add(planned_file(file.relative_to(path).as_posix(), file), str(file))

    def sorted(self) -> list[PlannedMember]:
        """Check that no file is a directory of another, and return the members sorted by name."""
        for key, (member, origin) in self._members.items():
            for depth in range(1, key.count("/") + 1):
                parent = self._members.get("/".join(key.split("/")[:depth]))
                if parent is not None:
                    raise DuplicateInput(
                        f"{parent[1]} would be a file where {origin} needs a directory"
                        f" ({member.name}). Rename one of them."
                    )
        return sorted(
            (member for member, _ in self._members.values()), key=lambda member: member.name
        )


def _check_names(spec: ArchiveSpec) -> None:
    if not is_model_name(spec.model_name):
        raise InvalidModelName(
            "Model name contains special characters.\n"
            r"The allowed regular expression filter for model name is:"
            rf" ^[A-Za-z0-9][A-Za-z0-9_\-.]*$ (given: {shown(spec.model_name)})"
        )
    if not spec.version or path_fault(spec.version) or "/" in spec.version:
        raise CannotPack(
            f"The version {shown(spec.version)} cannot be used: a version is part of URLs. Use a"
            " form such as 1.0."
        )
    if spec.runtime not in RUNTIMES:
        raise CannotPack(
            f"The runtime {shown(spec.runtime)} is unknown. Use one of {', '.join(RUNTIMES)}."
        )


def _add_handler(spec: ArchiveSpec, members: Members) -> str:
    """Add the handler, and return its entry in the manifest."""
    if spec.handler in BUILTIN_HANDLERS or (spec.runtime == "LSP" and spec.handler in CPP_HANDLERS):
        return spec.handler
    file, function = split_handler(spec.handler)
    suffix = _HANDLER_SUFFIX.get(spec.runtime, ".py")
    path = Path(file if file.endswith(suffix) else file + suffix)
    if not path.is_file():
        similar = difflib.get_close_matches(spec.handler, BUILTIN_HANDLERS, n=1)
        raise InputMissing(
            f"The handler {spec.handler} is neither a file ({path} does not exist) nor one of"
            f" {', '.join(BUILTIN_HANDLERS)}. "
            + (f"Did you mean {similar[0]}?" if similar else "Check it.")
        )
    members.add_file(path, "handler")
    name = Path(file).name
    return f"{name}:{function}" if function else name


def check_config(path: Path, warn: Warn | None = None) -> None:
    """Refuse a model-config.yaml with unused keys or values, or only warn about them."""
    # This module imports pydantic, which is slow.
    from tsx_archiver.metadata.modelconfig import load_model_config

    config, problems = load_model_config(path)
    if problems and (warn is None or not config.raw):
        text = f"{path}: {'; '.join(problems)}. Correct it and pack again."
        raise InvalidConfig(text.replace("?. ", "? "))
    for problem in problems:
        if warn is not None:
            warn(f"{path}: {problem}")


def extra_paths(extra: str | Sequence[Path | str] | None, warn: Warn | None) -> Iterator[Path]:
    """Yield the paths of extra files, with expanded patterns.

    Raises:
        InputMissing: A path does not exist.
    """
    for item in extra.split(",") if isinstance(extra, str) else extra or ():
        text = str(item).strip()
        if not text:
            continue
        if Path(text).exists():
            yield Path(text)
        elif glob.has_magic(text):
            matches = sorted(glob.glob(text))  # noqa: PTH207  # Path.glob takes no absolute pattern.
            if not matches:
                message = f"Given wildcard pattern did not match any file: {text}"
                if warn is None:
                    raise InputMissing(f"{message}. Check the pattern.")
                warn(message)
            yield from map(Path, matches)
        else:
            suggestion = similar_file(Path(text)) or "."
            raise InputMissing(
                f"The extra file {text} does not exist{suggestion} Check the path; several are"
                " separated by commas."
            )


def files_below(
    directory: Path,
    parents: frozenset[str] = frozenset(),
    *,
    is_left_out: Callable[[Path], bool] = lambda path: False,
) -> Iterator[Path]:
    """Yield every file below a directory; links are followed, but not to a parent directory."""
    real_path = os.path.realpath(directory)
    if real_path in parents:
        raise CannotPack(
            f"{directory} is a link to one of its parent directories. Remove the link."
        )
    for path in sorted(directory.iterdir()):
        if is_left_out(path):
            continue
        if not path.is_dir():
            yield path
        elif path.name not in _SKIPPED_DIRECTORIES:
            yield from files_below(path, parents | {real_path}, is_left_out=is_left_out)


def planned_file(name: str, path: Path) -> PlannedMember:
    """Return a member for a file.

    Raises:
        CannotPack: The path is a broken link, or is not a regular file.
    """
    if not path.exists():
        raise InputMissing(f"{path} is a broken link. Remove it, or restore what it points to.")
    if not path.is_file():
        raise CannotPack(f"{path} is not a regular file. Leave it out.")
    return PlannedMember(name, path, path.stat().st_size)


def _same_file(first: Path | bytes, second: Path | bytes) -> bool:
    if isinstance(first, Path) and isinstance(second, Path):
        return first.samefile(second)
    return first == second


def _merge_manifest(manifest: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    extra_keys = {
        key: value
        for key, value in extra.items()
        if key not in (CHECKSUMS_KEY, "archiverVersion", "model") and key not in manifest
    }
    model = {
        key: value
        for key, value in (extra.get("model") or {}).items()
        if key not in manifest["model"] and not key.endswith("File")
    }
    return {**manifest, "model": {**manifest["model"], **model}, **extra_keys}


def created_on() -> str:
    """Return the time in SOURCE_DATE_EPOCH, or a constant.

    The same inputs must give the same bytes. Neither the clock nor the times of files, which a
    checkout changes, can therefore be used.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    time = (
        datetime.fromtimestamp(int(epoch), timezone.utc)
        if epoch.isdigit()
        else datetime(1980, 1, 1, tzinfo=timezone.utc)
    )
    return time.strftime("%d/%m/%Y %H:%M:%S")
