"""The feature `python_files`, with the defaults of its handler."""

from __future__ import annotations

from tsx_archiver import OpenArchive
from tsx_archiver.python_file import HANDLER, LITSERVE, read_facts
from tsx_runtime.core.models.plan import HandlerDefaults
from tsx_runtime.feature import Feature

# The default for functions that take a batch.
DEFAULT_BATCH_SIZE = 32


class PythonFilesFeature(Feature):
    def handler_defaults(
        self, name: str, handler: str, archive: OpenArchive
    ) -> HandlerDefaults | None:
        if handler not in (HANDLER, LITSERVE):
            return None
        facts = read_facts(archive.manifest)
        limits = {"batch_size": DEFAULT_BATCH_SIZE} if facts.is_batched else {}
        return HandlerDefaults(limits, is_async=facts.is_async)
