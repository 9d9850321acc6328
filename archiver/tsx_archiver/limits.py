"""The limits above which an archive counts as a zip bomb."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20
MAX_MANIFEST_BYTES = 16 * MIB


@dataclass(frozen=True)
class Limits:
    """The limits of `open_archive` and `verify_archive`.

    Attributes:
        members: The largest number of files and directories.
        total: The largest unpacked size in bytes.
        ratio: The largest ratio of unpacked to packed size. Deflate cannot exceed 1032.
        ratio_floor: Bytes to which members above `ratio`, or a whole .tar.gz, may unpack.
    """

    members: int = 100_000
    total: int = 256 * GIB
    ratio: int = 200
    ratio_floor: int = 64 * MIB

    def is_dense(self, size: int, packed: int) -> bool:
        """Tell whether a ratio exceeds the limit."""
        return size > self.ratio * max(packed, 1)

    def too_dense(self, size: int, packed: int) -> bool:
        """Tell whether both the ratio and the size exceed the limits."""
        return size > self.ratio_floor and self.is_dense(size, packed)


def human(size: int) -> str:
    """Format a number of bytes: 1.5 GB."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return (
                f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
            )
        value /= 1000
    return f"{value:.1f} TB"
