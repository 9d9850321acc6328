"""Specs of archives for Hugging Face models.

A model is a directory that `save_pretrained` wrote, or comes from the Hub.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tsx_archiver import ArchiveSpec
from tsx_archiver.names import model_name_from
from tsx_archiver.pretrained import pretrained_spec
from tsx_archiver.progress import progress_bar
from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import archive_limits, read_pair
from tsx_runtime.sources.urls import HUB_SCHEME, is_hub


@dataclass(frozen=True)
class HuggingFaceOptions:
    """The options for Hugging Face models.

    Attributes:
        task: The task.
        adapters: NAME=DIR of PEFT adapters.
    """

    task: str | None = None
    adapters: Sequence[str] = ()

    @property
    def packing_options(self) -> str:
        """The names of the given options that only packing uses."""
        return ", ".join(
            name
            for name, value in {"--task": self.task, "--adapter": self.adapters}.items()
            if value
        )


def default_name(path: Path) -> str:
    if not is_hub(str(path)):
        return model_name_from(path.absolute().name)
    from tsx_runtime.features.huggingface.hub import parse_hub  # an optional feature

    return model_name_from(parse_hub(str(path)).repo.rpartition("/")[2])


def huggingface_spec(
    path: Path,
    options: HuggingFaceOptions,
    name: str | None,
    version: str | None,
    handler: str | None,
    *,
    quiet: bool = False,
) -> tuple[ArchiveSpec, list[str]]:
    """Return the spec of the archive, and notes; a model of the Hub is downloaded first.

    Raises:
        CliError: An option is invalid.
        ArchiveError: The directory contains no model that can be served.
        TsxError: The download failed.
    """
    adapters: dict[str, Path] = {}
    for option in options.adapters:
        label, folder = read_pair(option, "--adapter takes NAME=DIRECTORY")
        if label in adapters:
            raise UsageError(f"two adapters are called {label}; give each a name of its own")
        adapters[label] = _directory(Path(folder), quiet)[0]
    directory, source, revision = _directory(path, quiet)
    return pretrained_spec(
        directory,
        source=source,
        revision=revision,
        name=name,
        version=version,
        handler=handler,
        task=options.task,
        adapters=adapters,
    )


def _directory(path: Path, quiet: bool) -> tuple[Path, str, str | None]:
    """Return a model's directory, the name of its source, and its commit on the Hub."""
    if not is_hub(str(path)):
        return path, path.absolute().name, None
    from tsx_runtime.features.huggingface.hub import download, log_progress, parse_hub

    model = parse_hub(str(path))
    with progress_bar(f"Downloading {model}", shown=not quiet and sys.stderr.isatty()) as bar:
        write = (lambda line: None) if quiet else partial(print, file=sys.stderr, flush=True)
        progress = log_progress(model, write) if bar is None else partial(bar, "")
        directory = download(model, max_bytes=archive_limits().total, progress=progress)
    return directory, f"{HUB_SCHEME}{model.repo}", directory.name
