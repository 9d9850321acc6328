"""`ModelArchiverError`, the base of all errors of tsx's archiver.

Existing `except` clauses therefore catch them.
"""

from tsx_archiver.errors import ArchiveError as ModelArchiverError

__all__ = ["ModelArchiverError"]
