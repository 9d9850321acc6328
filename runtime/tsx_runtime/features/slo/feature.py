"""The feature `slo`, which dispatches by a latency target and reports how well it is kept."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import queue_of
from tsx_runtime.feature import Families, Feature, Labels
from tsx_runtime.features.slo.arbitration import DeviceArbiter
from tsx_runtime.features.slo.description import DescribedSlo
from tsx_runtime.features.slo.dispatcher import SloDispatcher


class SloFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self._arbiter = DeviceArbiter(registry.resources.machine.cores)

    def dispatcher(self, version: ModelVersion) -> SloDispatcher | None:
        plan, record = version.plan, version.benchmark_record
        target = plan.bounds.slo
        if target is None:
            return None
        return SloDispatcher(
            version.label,
            plan.limits,
            plan.bounds,
            target,
            record.curve if record is not None and record.here else (),
            queue_of(plan.strategy),
            self._arbiter,
        )

    def describe(self, version: ModelVersion) -> Mapping[str, DescribedSlo]:
        dispatcher = version.dispatcher
        if not isinstance(dispatcher, SloDispatcher):
            return {}
        control, attainment = dispatcher.control, dispatcher.attainment
        return {
            "slo": DescribedSlo(
                target=control.target.text,
                batch_size=control.aim.size,
                attained=attainment.attained,
                missed=attainment.missed,
                refused=attainment.refused,
                attainment=attainment.recent(),
                budget_left=attainment.budget_left(control.target.quantile),
            )
        }

    def add_version_metrics(
        self, families: Families, version: ModelVersion, labels: Labels
    ) -> None:
        dispatcher = version.dispatcher
        if not isinstance(dispatcher, SloDispatcher):
            return
        control, attainment = dispatcher.control, dispatcher.attainment
        families.add_rows(
            labels,
            (
                "tsx_slo_target_seconds",
                "gauge",
                "latency target of a version",
                control.target.seconds,
            ),
            (
                "tsx_slo_target_ratio",
                "gauge",
                "share of the accepted requests that are to be answered within the target",
                control.target.quantile,
            ),
            (
                "tsx_slo_attained_total",
                "counter",
                "accepted requests that were answered within the latency target",
                attainment.attained,
            ),
            (
                "tsx_slo_missed_total",
                "counter",
                "accepted requests that were answered later, or not at all",
                attainment.missed,
            ),
            (
                "tsx_slo_refused_total",
                "counter",
                "requests refused on arrival, since they would have been late",
                attainment.refused,
            ),
            (
                "tsx_slo_batch_size",
                "gauge",
                "size of the batches that requests are accepted for at present",
                control.aim.size,
            ),
        )
