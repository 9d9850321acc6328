"""The feature `cache`, which puts a `ReplyCache` before the queue of a version."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.errors import BadRequest
from tsx_runtime.feature import Families, Feature, Labels
from tsx_runtime.features.cache.description import DescribedCache
from tsx_runtime.features.cache.reply_cache import ReplyCache
from tsx_runtime.features.cache.settings import CacheSettings


class CacheFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.caches: dict[ModelVersion, ReplyCache] = {}

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        settings = CacheSettings.of(self.registry.settings.models, version.name)
        config = settings.cache or version.config.cache
        if config is None or not config.size:
            return None
        if version.config.sequence_batching:
            raise BadRequest(
                "cache does not apply to a model with sequenceBatching: what it answers depends on"
                " earlier requests. Remove one."
            )
        cache = self.caches.setdefault(version, ReplyCache(config, version))
        cache.clear()
        return cache.around(entry)

    def end_version(self, version: ModelVersion) -> None:
        if cache := self.caches.pop(version, None):
            cache.clear()

    def describe(self, version: ModelVersion) -> Mapping[str, DescribedCache]:
        cache = self.caches.get(version)
        if cache is None:
            return {}
        requests = cache.hits + cache.misses
        return {
            "cache": DescribedCache(
                entries=len(cache),
                size=cache.size,
                max_size=cache.config.size,
                hits=cache.hits,
                misses=cache.misses,
                hit_ratio=cache.hits / requests if requests else None,
            )
        }

    def add_version_metrics(
        self, families: Families, version: ModelVersion, labels: Labels
    ) -> None:
        cache = self.caches.get(version)
        if cache is None:
            return
        families.add_rows(
            labels,
            (
                "tsx_cache_hits_total",
                "counter",
                "requests answered from the reply cache",
                cache.hits,
            ),
            (
                "tsx_cache_misses_total",
                "counter",
                "requests that the reply cache could not answer",
                cache.misses,
            ),
            (
                "tsx_cache_evictions_total",
                "counter",
                "answers removed from the reply cache for others",
                cache.evictions,
            ),
            ("tsx_cache_bytes", "gauge", "bytes of the answers in the reply cache", cache.size),
        )
