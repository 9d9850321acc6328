"""The version of torch-model-archiver with which tsx's archiver is compatible."""

__version__ = "0.12.0"
