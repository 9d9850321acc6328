"""The import surface of TorchServe's `model_archiver`, for scripts that pack models from Python."""

from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.version import __version__

__all__ = ["ModelArchiver", "ModelArchiverConfig", "__version__"]
