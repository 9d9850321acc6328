"""The version of torch-workflow-archiver with which tsx's archiver is compatible."""

__version__ = "0.2.15"
