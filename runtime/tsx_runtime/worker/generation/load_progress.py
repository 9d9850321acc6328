"""The progress of loading a model's weights, which transformers shows in bars, as lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tsx_runtime.worker.exceptions import LoadError

LOG_EVERY = 5.0  # seconds between two lines

logger = logging.getLogger("tsx.worker")


class _LogLines:
    """What a progress bar writes, as lines of the log."""

    def write(self, text: str) -> None:
        if text.strip():
            logger.info("%s", text.strip())

    def flush(self) -> None:
        pass


@contextmanager
def progress_in_log(directory: Path) -> Iterator[None]:
    try:
        from transformers.utils import logging as bars  # an extra
    except ModuleNotFoundError as error:
        raise LoadError("Hugging Face models are loaded by transformers: pip install 'tsx-serve[transformers]'") from error
    files = [path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin")]
    logger.info("loading %d file(s) of weights, %.1f MB", len(files), sum(path.stat().st_size for path in files) / 1e6)
    lines = {"file": _LogLines(), "mininterval": LOG_EVERY, "bar_format": "{desc}: {n_fmt} of {total_fmt}", "leave": False}
    before = bars.set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, **lines}))
    try:
        yield
    finally:
        bars.set_tqdm_hook(before)
