"""`WorkflowArchiverError`, the base of all errors of tsx's archiver.

Therefore existing `except` clauses catch these errors.
"""

from tsx_archiver.errors import ArchiveError as WorkflowArchiverError

__all__ = ["WorkflowArchiverError"]
