"""TorchServe's archiver error is the base class of all errors of tsx's archiver, so that existing
`except` clauses catch them.
"""

from tsx_archiver.errors import ArchiveError as ModelArchiverError

__all__ = ["ModelArchiverError"]
