"""The import surface of TorchServe's `model_archiver`, for scripts that pack models from Python."""

from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig

__all__ = ["ModelArchiver", "ModelArchiverConfig"]
