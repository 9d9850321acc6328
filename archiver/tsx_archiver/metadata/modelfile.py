"""The kind of a model file, detected by its bytes without torch and without running code."""

from __future__ import annotations

import json
import pickletools
import stat
import struct
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from tsx_archiver.containers.zip import directory_size
from tsx_archiver.errors import InputMissing
from tsx_archiver.limits import MIB
from tsx_archiver.metadata.onnx_file import Onnx, detect_onnx
from tsx_archiver.metadata.tabular import SKOPS_SCHEMA, TabularKind, detect_table_model
from tsx_archiver.names import shown

Kind: TypeAlias = (
    Literal["eager", "torchscript", "exported", "aotinductor", "onnx", "safetensors", "unknown"]
    | TabularKind
)

_LEGACY_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_MAX_DIRECTORY = 256 * MIB
_MAX_PICKLE = 64 * MIB
_MAX_SAFETENSORS_HEADER = 100 * MIB
_TENSOR_MODULES = ("torch", "collections", "numpy", "_codecs", "builtins", "__builtin__", "copyreg")


@dataclass(frozen=True)
class ModelFile:
    """The description of a model file.

    Attributes:
        path: The path.
        kind: The kind.
        size: The size in bytes.
        detail: Further information for a known kind, for display.
        device: The device of an AOTInductor package: cpu, cuda, ...
        whole_object: The class of a pickled module, which torch refuses with `weights_only=True`.
        problem: Why the file cannot be used as it is, and what to do.
        is_broken: Whether no handler can load it. A file that is only of an unknown kind may suit a
            custom handler.
    """

    path: Path
    kind: Kind
    size: int
    detail: str = ""
    device: str | None = None
    whole_object: str | None = None
    problem: str | None = None
    is_broken: bool = False


def describe_model_file(path: Path, *, called: Path | None = None) -> ModelFile:
    """Describe a model file; an unknown, empty or truncated one has a `problem`.

    Args:
        path: The file.
        called: The path to show in messages, if the real one tells the user nothing.

    Raises:
        InputMissing: The file cannot be read.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        # Opening a pipe would wait for its writer.
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            with path.open("rb") as file:
                return describe_model_stream(file, called or path)
    except IsADirectoryError as error:
        raise InputMissing(
            f"{path} is a directory, not a model file. Name the file in it."
        ) from error
    except OSError as error:
        raise InputMissing(
            f"{called or path} cannot be read ({error.strerror}). Check the path."
        ) from error
    except ValueError as error:  # The path contains NUL, or a character that cannot be encoded.
        raise InputMissing(
            f"{shown(str(path))} cannot be the name of a file. Check the path."
        ) from error
    raise InputMissing(f"{path} is not a regular file. Name a model file.")


def describe_model_stream(file: BinaryIO, path: Path) -> ModelFile:
    """Describe an open file; `path` is shown in messages, and its suffix is a hint."""
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(512)
    if not head:
        return _broken_file(path, 0, "is empty (0 bytes); copy or download it again")
    if head.startswith(b"PK"):
        return _describe_zip(file, path, size)
    if head.startswith(_LEGACY_TORCH):
        return _describe_legacy(file, path, size)
    if _LEGACY_TORCH.startswith(head):
        return _broken_file(path, size, "is truncated; copy or download it again")
    placeholder = _placeholder_problem(head)
    if not placeholder and (kind := detect_table_model(head, path.suffix)):
        return ModelFile(path, kind, size)
    if (
        len(head) >= 9
        and head[8:9] == b"{"
        and struct.unpack("<Q", head[:8])[0] <= max(_MAX_SAFETENSORS_HEADER, size)
    ):
        return _describe_safetensors(file, path, size)
    onnx = detect_onnx(file, size)
    if onnx is Onnx.WHOLE:
        return ModelFile(path, "onnx", size)
    if onnx is Onnx.TRUNCATED and path.suffix.lower() == ".onnx":
        return _broken_file(
            path, size, "begins as an ONNX model but is truncated; copy or download it again"
        )
    if placeholder:
        return _broken_file(path, size, placeholder)
    return _unknown_file(path, size, _foreign_problem(head, path.suffix.lower()))


def _unknown_file(path: Path, size: int, problem: str) -> ModelFile:
    return ModelFile(path, "unknown", size, problem=f"{path} {problem}.")


def _broken_file(path: Path, size: int, problem: str) -> ModelFile:
    return replace(_unknown_file(path, size, problem), is_broken=True)


def _placeholder_problem(head: bytes) -> str | None:
    """Return the problem of a file that was stored or downloaded in place of the real one."""
    text = head.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the model itself; run 'git lfs pull'"
    if text.startswith((b"<!doctype", b"<html")):
        return "is a web page, not a model; download the file itself"
    return None


def _foreign_problem(head: bytes, suffix: str) -> str:
    if head.lstrip().startswith(b"<?xml"):
        return "is an XML file, perhaps a web page; download the file itself"
    if head.startswith(b"\x1f\x8b"):
        return (
            "is gzipped: if it is a .tar.gz archive, serve it directly, otherwise unpack it first"
        )
    if head.startswith(b"\x80"):
        return (
            "is a pickle, but not one that torch.save wrote; save the model with"
            " torch.save(model.state_dict(), path)"
        )
    if suffix == ".json":
        return "does not begin as an XGBoost model does; write it by save_model, not by dump_model"
    return (
        f"is not a model file (it begins with {head[:8]!r}); torch.save, TorchScript, .pt2, ONNX,"
        " safetensors, skops, XGBoost and LightGBM files are supported"
    )


def _describe_zip(file: BinaryIO, path: Path, size: int) -> ModelFile:
    directory = directory_size(file)
    if directory is None:
        return _broken_file(
            path,
            size,
            "begins as a zip file, as torch writes them, but is truncated; copy or download it"
            " again",
        )
    if directory > _MAX_DIRECTORY:
        return _unknown_file(path, size, "is a zip file with too many members for a model")
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
        return _broken_file(
            path,
            size,
            f"begins as a zip file, as torch writes them, but is damaged ({error}); copy or"
            " download it again",
        )
    with archive:
        paths = [info.orig_filename for info in archive.infolist()]
        top_names = {path.partition("/")[0] for path in paths}
        is_nested = len(top_names) == 1 and all("/" in path for path in paths)
        prefix = f"{top_names.pop()}/" if is_nested else ""
        names = {path[len(prefix) :] for path in paths}
        return _zip_kind(archive, prefix, names, path, size)


def _zip_kind(
    archive: zipfile.ZipFile, prefix: str, names: set[str], path: Path, size: int
) -> ModelFile:
    if "MAR-INF/MANIFEST.json" in names:
        return _unknown_file(path, size, "is already a model archive; rename it to end in .mar")
    if any(name.startswith("data/aotinductor/") for name in names):
        device = _aoti_device(archive, prefix, names)
        return ModelFile(
            path, "aotinductor", size, f"compiled for {device}" if device else "", device
        )
    programs = [name for name in names if name.startswith("models/") and name.endswith(".json")]
    if "archive_format" in names and programs:
        return ModelFile(path, "exported", size, _batch_detail(archive, prefix + min(programs)))
    if "serialized_exported_program.json" in names:
        return ModelFile(path, "exported", size, "in the format of torch before 2.7")
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return ModelFile(
            path, "torchscript", size, "for the lite interpreter" if "bytecode.pkl" in names else ""
        )
    if ".data/extern_modules" in names:
        return _unknown_file(
            path, size, "is a torch.package; save it with torch.export.save or as weights"
        )
    if SKOPS_SCHEMA in names:
        return ModelFile(path, "skops", size)
    if "data.pkl" in names:
        return _describe_eager(archive, f"{prefix}data.pkl", path, size)
    return _unknown_file(path, size, "is a zip file, but not one that torch writes")


def _aoti_device(archive: zipfile.ZipFile, prefix: str, names: set[str]) -> str | None:
    for name in sorted(names):
        if name.startswith("data/aotinductor/") and name.endswith("_metadata.json"):
            try:
                device = json.loads(_read(archive, prefix + name, MIB)).get("AOTI_DEVICE_KEY")
            except (ValueError, AttributeError):
                continue
            if isinstance(device, str) and device:
                return device
    return None


def _batch_detail(archive: zipfile.ZipFile, program: str) -> str:
    """Tell how many rows an exported program takes, if that is a constant."""
    try:
        module = json.loads(_read(archive, program, _MAX_PICKLE))["graph_module"]
        inputs = [
            spec["user_input"]["arg"]
            for spec in module["signature"]["input_specs"]
            if "user_input" in spec
        ]
        sizes = module["graph"]["tensor_values"][inputs[0]["as_tensor"]["name"]]["sizes"]
        return f"takes batches of exactly {sizes[0]['as_int']}" if len(sizes) > 1 else ""
    except (ValueError, LookupError, TypeError, RecursionError):
        # The dimension is dynamic, or the schema has changed.
        return ""


def _describe_eager(archive: zipfile.ZipFile, name: str, path: Path, size: int) -> ModelFile:
    try:
        content = _read(archive, name, _MAX_PICKLE)
    except ValueError:
        return ModelFile(path, "eager", size)
    class_name = _pickled_class(content)
    return ModelFile(path, "eager", size, _eager_detail(class_name), whole_object=class_name)


def _describe_legacy(file: BinaryIO, path: Path, size: int) -> ModelFile:
    """Describe a file of torch before 1.6.

    It holds a magic number, the protocol version, system information, the object, the keys of its
    storages, and their bytes.
    """
    file.seek(0)
    try:
        for _ in range(3):
            for _ in pickletools.genops(file):
                pass
        class_name = _pickled_class(file.read(_MAX_PICKLE))
    except ValueError:
        return _broken_file(path, size, "is truncated; copy or download it again")
    return ModelFile(
        path,
        "eager",
        size,
        "in the format of torch before 1.6"
        + (f", {_eager_detail(class_name)}" if class_name else ""),
        whole_object=class_name,
    )


def _eager_detail(class_name: str | None) -> str:
    return f"a whole pickled {class_name}" if class_name else "weights"


def _pickled_class(content: bytes) -> str | None:
    """Return the first class in a pickle that a state dict would not contain.

    The pickle is never loaded.
    """
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(content):
            module, name = "", ""
            if opcode.name == "GLOBAL":
                module, _, name = str(argument).partition(" ")
            elif opcode.name == "STACK_GLOBAL" and len(texts) >= 2:
                module, name = texts[-2:]
            elif isinstance(argument, str):
                texts.append(argument)
            is_module_class = (
                module.startswith("torch.nn.modules") or module.split(".")[0] not in _TENSOR_MODULES
            )
            if module and is_module_class:
                return f"{module}.{name}"
    except ValueError:  # This is raw data of a legacy file, or the end of a damaged one.
        return None
    return None


def _read(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Return the bytes of a member.

    Raises:
        ValueError: The member is damaged, or larger than `max_bytes`.
    """
    if archive.getinfo(name).file_size > max_bytes:
        raise ValueError(f"{name} is larger than {max_bytes} bytes")
    try:
        with archive.open(name) as member:
            return member.read(max_bytes + 1)
    except (zipfile.BadZipFile, OSError, RuntimeError, EOFError) as error:
        raise ValueError(str(error)) from error


def _describe_safetensors(file: BinaryIO, path: Path, size: int) -> ModelFile:
    file.seek(0)
    length = struct.unpack("<Q", file.read(8))[0]
    if length > _MAX_SAFETENSORS_HEADER:
        return _broken_file(
            path,
            size,
            f"looks like safetensors, but its header gives its own length as {length} bytes",
        )
    header = file.read(length)
    truncation = "begins as safetensors but is truncated; copy or download it again"
    if len(header) < length:
        return _broken_file(path, size, truncation)
    try:
        tensors = json.loads(header)
        end_offsets = [
            int(tensor["data_offsets"][1])
            for name, tensor in tensors.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return _broken_file(
            path,
            size,
            "looks like safetensors, but its header cannot be read; copy or download it again",
        )
    if size < 8 + length + max(end_offsets, default=0):
        return _broken_file(path, size, truncation)
    return ModelFile(
        path,
        "safetensors",
        size,
        f"{len(end_offsets)} tensor{'' if len(end_offsets) == 1 else 's'}",
    )
