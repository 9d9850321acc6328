"""A separate protobuf pool for the descriptors of the messages.

In protobuf's default pool, a message's name can exist only once in a process. Clients' generated
code (TorchServe's `inference_pb2`, `tritonclient`) uses the same names, and could not be imported
in a process with this server. Serialized descriptors also work with any protobuf release.
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


def load_messages(namespace: dict[str, Any], files: Sequence[tuple[str, bytes]]) -> None:
    """Add files to the pool, and add the message classes of the last one to `namespace`.

    Args:
        namespace: The globals of a module.
        files: Names with serialized descriptors; imported files come first.
    """
    for name, serialized in files:
        if name not in _loaded_files:
            POOL.AddSerializedFile(serialized)
            _loaded_files.add(name)
    for name, message in POOL.FindFileByName(files[-1][0]).message_types_by_name.items():
        namespace[name] = GetMessageClass(message)


def copy_under_package(name: str, package: str) -> bytes:
    """Return a copy of a file's descriptor with another package name."""
    file = FileDescriptorProto.FromString(POOL.FindFileByName(name).serialized_pb)
    text = text_format.MessageToString(file).replace(f'".{file.package}.', f'".{package}.')
    copy = text_format.Parse(text, FileDescriptorProto())
    copy.name, copy.package = f"{package}.proto", package
    return copy.SerializeToString()
