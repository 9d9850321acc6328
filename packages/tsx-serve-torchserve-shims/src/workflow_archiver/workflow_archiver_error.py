"""`WorkflowArchiverError`, the base of all errors of tsx's archiver.

Existing `except` clauses therefore catch them.
"""

from tsx_archiver.errors import ArchiveError as WorkflowArchiverError

__all__ = ["WorkflowArchiverError"]
