"""Shares the pages of a model's weights among its workers: tensors become views of the mapped model
file.

A worker that holds weights in memory of its own costs their size each time. Torch and safetensors
files store each tensor uncompressed and aligned, so a tensor can point into a private file mapping
instead: the pages are the file's in the page cache, one copy for all processes, until a process
writes to one. `torch.load(mmap=True)` and safetensors do that by themselves. `torch.jit.load` and
`torch.export.load` copy; `share_with_file` swaps their copies for the mapping afterwards. It finds
a tensor's place by its content, which holds for every version of those formats and cannot pick a
wrong one.
"""

from __future__ import annotations

import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

LEAST = 16 << 10  # bytes; smaller tensors are not worth a look
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member: name and extra lengths come last


class Record(NamedTuple):
    """Where a stored member of a zip file has its bytes."""

    offset: int
    size: int


def share_with_file(tensors: Iterable[torch.Tensor], path: Path) -> int:
    """Let CPU tensors that `path` holds uncompressed use its pages.

    Returns how many bytes are shared now.
    """
    groups: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= LEAST
        ):
            groups[tensor.untyped_storage().data_ptr()].append(tensor)
    if not groups:
        return 0
    by_size: dict[int, list[Record]] = defaultdict(list)
    for record in stored_records(path):
        by_size[record.size].append(record)
    # Private: what a handler writes into a weight is a copy of its own.
    mapping: Any = torch.UntypedStorage.from_file(
        str(path), shared=False, nbytes=path.stat().st_size
    )
    shared = 0
    for group in groups.values():
        storage = group[0].untyped_storage()
        found = next(
            (record for record in by_size[storage.nbytes()] if _same(storage, mapping, record)),
            None,
        )
        if found is not None and all(found.offset % tensor.element_size() == 0 for tensor in group):
            for tensor in group:
                start = found.offset // tensor.element_size() + tensor.storage_offset()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                    mapping, start, tensor.size(), tensor.stride()
                )
            shared += found.size
    return shared


def stored_records(path: Path) -> list[Record]:
    """The members that are not compressed, or none where the file is not a zip."""
    records = []
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.compress_type == zipfile.ZIP_STORED and info.file_size >= LEAST:
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


def _same(storage: torch.UntypedStorage, mapping: torch.UntypedStorage, record: Record) -> bool:
    mine = torch.empty(0, dtype=torch.uint8).set_(storage)
    its = torch.empty(0, dtype=torch.uint8).set_(mapping, record.offset, (record.size,), (1,))
    return torch.equal(mine, its)
