"""The feature `tabular`, with the defaults of its handler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.tabular import EXTRA, HANDLER
from tsx_runtime.core.models.plan import HandlerDefaults
from tsx_runtime.feature import Feature
from tsx_runtime.features.tabular.settings import TabularSettings

DEFAULT_BATCH_SIZE = 64


class TabularFeature(Feature):
    @property
    def named_models(self) -> Collection[str]:
        return TabularSettings.of(self.registry.settings).trust_pickle

    def handler_defaults(
        self, name: str, handler: str, archive: OpenArchive
    ) -> HandlerDefaults | None:
        if handler != HANDLER:
            return None
        # Code that came with a model may mix the rows of a batch.
        limits = {} if name in self.named_models else {"batch_size": DEFAULT_BATCH_SIZE}
        return HandlerDefaults(limits, package=("pandas", EXTRA))

    def handler_properties(self, model: str) -> Mapping[str, Any]:
        return {"trust_pickle": model in self.named_models}
