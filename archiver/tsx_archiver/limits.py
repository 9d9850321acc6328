"""The limits beyond which an archive counts as a zip bomb."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20
MAX_MANIFEST_BYTES = 16 * MIB


@dataclass(frozen=True)
class Limits:
    """The limits of `open_archive` and `verify_archive`; sizes in bytes.

    What a machine can bear is no bomb: members with a higher ratio, or a whole .tar.gz, may unpack
    to `ratio_floor` together. Deflate cannot exceed a ratio of 1032.
    """

    members: int = 100_000
    total: int = 256 * GIB
    ratio: int = 200
    ratio_floor: int = 64 * MIB

    def is_dense(self, size: int, packed: int) -> bool:
        return size > self.ratio * max(packed, 1)

    def too_dense(self, size: int, packed: int) -> bool:
        return size > self.ratio_floor and self.is_dense(size, packed)


def human(size: int) -> str:
    """A size for people: 1.5 GB."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return (
                f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
            )
        value /= 1000
    return f"{value:.1f} TB"
