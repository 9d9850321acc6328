"""The version of torch-workflow-archiver that tsx's archiver is compatible with."""

__version__ = "0.2.15"
