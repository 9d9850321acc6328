"""`ModelArchiver`, which packs a model according to a `ModelArchiverConfig`."""

from __future__ import annotations

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import package_model


class ModelArchiver:
    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        package_model(config)


__all__ = ["ModelArchiver", "package_model"]
