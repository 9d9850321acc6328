"""The import surface of TorchServe's `workflow_archiver`, for scripts that pack workflows."""

from workflow_archiver.version import __version__

__all__ = ["__version__"]
