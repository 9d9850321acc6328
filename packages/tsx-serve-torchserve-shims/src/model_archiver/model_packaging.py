"""`package_model` for scripts, and the entry point of torch-model-archiver."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path

from model_archiver.model_archiver_config import ModelArchiverConfig
from tsx_archiver import torch_model_archiver
from tsx_archiver.writing import write_archive

_log = logging.getLogger(__name__)


def package_model(config: ModelArchiverConfig | Namespace, manifest: str | None = None) -> None:
    """Pack a model; other keys of `manifest`, which is JSON, are added to the model's manifest."""
    full_config = (
        config if isinstance(config, ModelArchiverConfig) else ModelArchiverConfig.from_args(config)
    )
    write_archive(
        full_config.spec(manifest),
        Path(full_config.export_path or "."),
        format=full_config.archive_format or "default",
        force=bool(full_config.force),
        warn=_log.warning,
    )


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Pack the model of `config`. Without it, act as the command torch-model-archiver and exit."""
    if config is None:
        sys.exit(torch_model_archiver.main())
    package_model(config)
