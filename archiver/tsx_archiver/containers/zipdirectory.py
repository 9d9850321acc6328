"""How large a zip file's directory is: asked before `zipfile` reads all of it into memory."""

from __future__ import annotations

import struct
from typing import BinaryIO

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LONGEST_COMMENT = 65535


def directory_size(file: BinaryIO) -> int | None:
    """Bytes of the central directory by the record at the file's end; None where there is no such record."""
    size = file.seek(0, 2)
    tail_size = min(size, _LONGEST_COMMENT + _END.size + _END64_LOCATOR.size)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        return None
    directory = int(_END.unpack_from(tail, at)[5])
    locator = at - _END64_LOCATOR.size
    if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
        file.seek(min(_END64_LOCATOR.unpack_from(tail, locator)[2], size))
        record = file.read(_END64.size)
        if len(record) == _END64.size:
            directory = _END64.unpack(record)[8]
    file.seek(0)
    return directory
