"""A separate protobuf pool for the descriptors of the messages.

In protobuf's default pool a name exists only once in a process. The generated code of a client
(`inference_pb2` of TorchServe's users, `tritonclient`) has the same names. It and this server would
fail to import beside each other. Descriptors are data, so they also fit any protobuf release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

POOL = DescriptorPool()
_loaded_files: set[str] = set()


def load(namespace: dict[str, Any], files: Sequence[tuple[str, bytes]]) -> None:
    """Add files to the pool, and put the messages of the last one into `namespace`.

    Args:
        namespace: The globals of a module.
        files: Names with serialized descriptors; a file follows those that it imports.
    """
    for name, serialized in files:
        if name not in _loaded_files:
            POOL.AddSerializedFile(serialized)
            _loaded_files.add(name)
    for name, message in POOL.FindFileByName(files[-1][0]).message_types_by_name.items():
        namespace[name] = GetMessageClass(message)


def renamed(name: str, package: str) -> bytes:
    """Return the descriptor of a file of the pool under another package name."""
    file = FileDescriptorProto.FromString(POOL.FindFileByName(name).serialized_pb)
    text = text_format.MessageToString(file).replace(f'".{file.package}.', f'".{package}.')
    copy = text_format.Parse(text, FileDescriptorProto())
    copy.name, copy.package = f"{package}.proto", package
    return copy.SerializeToString()
