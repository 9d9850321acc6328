"""A configuration is one way to run a model; `tsx bench` varies it, and `--write` saves it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tsx_archiver.metadata.forms import REFERENCE
from tsx_cli.common.failure import UsageError

PRECISIONS = ("fp32", "fp16", "bf16")
MAX_NUMBER = 4096
AS_IS = "as is"  # the precision of the archive
_RANGE = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?")


class Variant(NamedTuple):
    """The properties of a worker that affect its times.

    The number of workers and the batch size are not part of it.
    """

    device: str
    precision: str
    compiled: bool | None
    threads: int | None
    form: str | None

    @property
    def kind(self) -> Variant:
        """The variant without its number of threads."""
        return self._replace(threads=None)


@dataclass(frozen=True, order=True)
class Configuration:
    """A way to run a model.

    `device` is `cpu` or `cuda`. `threads` is the number per worker; None leaves it to the runtime.
    """

    device: str = "cpu"
    precision: str = AS_IS
    compiled: bool | None = None  # None: the archive's setting
    threads: int | None = None
    workers: int = 1
    batch_size: int = 1
    form: str | None = None  # a form in the archive or REFERENCE; None: the archive's setting

    @property
    def variant(self) -> Variant:
        """The variant; configurations of one variant share a curve t(n)."""
        return Variant(self.device, self.precision, self.compiled, self.threads, self.form)

    def threads_per_worker(self, cores: int, archive_threads: int | None = None) -> int:
        """Return the number of threads of each worker.

        If neither the configuration nor the archive sets it, the runtime divides the cores among
        the workers.
        """
        return self.threads or archive_threads or max(1, cores // self.workers)

    def keys(self) -> dict[str, Any]:
        """Return the keys of model-config.yaml for this configuration; None removes a key."""
        keys: dict[str, Any] = {
            "minWorkers": self.workers,
            "maxWorkers": self.workers,
            "batchSize": self.batch_size,
        }
        keys["deviceType"] = "cpu" if self.device == "cpu" else "gpu"
        if self.threads is not None:
            keys["threads"] = self.threads
        if self.precision != AS_IS:
            keys["precision"] = self.precision
        if self.compiled is not None:
            keys["pt2"] = {"compile": {"enable": True}} if self.compiled else None
        if self.form is not None:
            keys["forms"] = None if self.form == REFERENCE else [self.form]
        return keys

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self._description(
            f"{self.workers} worker{'s' if self.workers != 1 else ''}", f"batch {self.batch_size}"
        )

    @property
    def worker(self) -> str:
        """The description of a worker, without the number of workers and the batch size."""
        return self._description("", "")

    def _description(self, workers: str, batches: str) -> str:
        precision = "" if self.precision == AS_IS else self.precision
        threads = (
            ""
            if self.threads is None
            else f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        )
        return ", ".join(
            filter(
                None,
                [
                    self.device,
                    self.form,
                    precision,
                    "compiled" if self.compiled else "",
                    workers,
                    threads,
                    batches,
                ],
            )
        )


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse `1,2,4` or `1..32`; a range means both ends and the powers of two between them.

    Raises:
        UsageError: The text has another form, or a number is too large.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MAX_NUMBER:
            raise UsageError(
                f"{option}: '{part.strip()}' is not a number from 1 to {MAX_NUMBER} or a range of"
                " them; write 1,2,4 or 1..32"
            )
        numbers |= {low, high, *(2**power for power in range(13) if low < 2**power < high)}
    return tuple(sorted(numbers))
