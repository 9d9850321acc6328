"""Sharing of weights between workers, by tensors that are views of the mapped model file.

Files of torch and safetensors store tensors uncompressed and aligned. Therefore a tensor can point
into a private mapping of the file. All processes share one copy of its pages; a process that writes
to a page gets its own copy.

`torch.load(mmap=True)` and safetensors map files themselves. `torch.jit.load` and
`torch.export.load` copy tensors, which `share_with_file` replaces by the mapping afterwards. It
finds a tensor in the file by its content. This works for every version of the formats, and cannot
find a wrong tensor.
"""

from __future__ import annotations

import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

MIN_SHARED_BYTES = 16 << 10  # Sharing does not pay for smaller tensors.
# The header of a zip member ends with the lengths of the name and of the extra field.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


class Record(NamedTuple):
    """The bytes of an uncompressed member of a zip file."""

    offset: int
    size: int


def share_with_file(tensors: Iterable[torch.Tensor], path: Path) -> int:
    """Let CPU tensors use the pages of a file that contains them uncompressed.

    Returns:
        The number of shared bytes.
    """
    groups: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= MIN_SHARED_BYTES
        ):
            groups[tensor.untyped_storage().data_ptr()].append(tensor)
    if not groups:
        return 0
    records_by_size: dict[int, list[Record]] = defaultdict(list)
    for record in stored_records(path):
        records_by_size[record.size].append(record)
    # The mapping is private, so that a handler that writes to a weight writes to a copy.
    mapping: Any = torch.UntypedStorage.from_file(
        str(path), shared=False, nbytes=path.stat().st_size
    )
    shared_bytes = 0
    for group in groups.values():
        storage = group[0].untyped_storage()
        matching_record = next(
            (
                record
                for record in records_by_size[storage.nbytes()]
                if _is_equal(storage, mapping, record)
            ),
            None,
        )
        if matching_record is not None and all(
            matching_record.offset % tensor.element_size() == 0 for tensor in group
        ):
            for tensor in group:
                start = matching_record.offset // tensor.element_size() + tensor.storage_offset()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                    mapping, start, tensor.size(), tensor.stride()
                )
            shared_bytes += matching_record.size
    return shared_bytes


def stored_records(path: Path) -> list[Record]:
    """Return the uncompressed members of a zip file, and nothing for other files."""
    records = []
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.compress_type == zipfile.ZIP_STORED and info.file_size >= MIN_SHARED_BYTES:
                    file.seek(info.header_offset)
                    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                    records.append(
                        Record(
                            info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1],
                            info.file_size,
                        )
                    )
    except (zipfile.BadZipFile, struct.error):
        return []
    return records


def _is_equal(storage: torch.UntypedStorage, mapping: torch.UntypedStorage, record: Record) -> bool:
    tensor_bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
    file_bytes = torch.empty(0, dtype=torch.uint8).set_(
        mapping, record.offset, (record.size,), (1,)
    )
    return torch.equal(tensor_bytes, file_bytes)
