"""A separate pool for the messages' descriptors.

In protobuf's default pool a name exists once in a process. A client's generated code
(`inference_pb2` of TorchServe's users, `tritonclient`) has the same names, and would fail to import
beside this server, or this server beside it. Nor do these modules need the protobuf release that
their generator belonged to: a descriptor is data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

POOL = DescriptorPool()
_added: set[str] = set()


def load(namespace: dict[str, Any], files: Sequence[tuple[str, bytes]]) -> None:
    """Add files (name, serialized descriptor; those that others need first), and put the last one's
    messages into `namespace`.
    """
    for name, serialized in files:
        if name not in _added:
            POOL.AddSerializedFile(serialized)
            _added.add(name)
    for name, message in POOL.FindFileByName(files[-1][0]).message_types_by_name.items():
        namespace[name] = GetMessageClass(message)


def renamed(name: str, package: str) -> bytes:
    """Return the descriptor of a file of the pool under another package name."""
    file = FileDescriptorProto.FromString(POOL.FindFileByName(name).serialized_pb)
    text = text_format.MessageToString(file).replace(f'".{file.package}.', f'".{package}.')
    copy = text_format.Parse(text, FileDescriptorProto())
    copy.name, copy.package = f"{package}.proto", package
    return copy.SerializeToString()
