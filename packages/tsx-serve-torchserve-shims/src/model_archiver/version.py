"""The version of torch-model-archiver that tsx's archiver is compatible with."""

__version__ = "0.12.0"
