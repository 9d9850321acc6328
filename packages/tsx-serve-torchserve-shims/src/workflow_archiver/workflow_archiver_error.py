"""The one error of TorchServe's archiver is here the root of all of ours, so that whoever catches it catches them."""

from tsx_archiver.errors import ArchiveError as WorkflowArchiverError

__all__ = ["WorkflowArchiverError"]
