"""The prediction from an archive's benchmark: throughput, and the load at which to scale.

Figures apply to machines like the measured one, so they are shown with that machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Curve
from tsx_cli.bench.report.archive_record import ArchiveRecord
from tsx_cli.common.output import milliseconds, rounded
from tsx_runtime.core.placement.hardware import describe

SCALING_FRACTION = 0.8  # fraction of an instance's capacity at which another should start
MAX_POINTS = 6  # number of points of the curve that are shown


class DeploymentScaling(NamedTuple):
    """The scaling of a deployment.

    `fewest` and `most` are numbers of instances, or None if the target has no instances.
    """

    fewest: int | None = None
    most: int | None = None
    target: float | None = None  # the scaling target in the specification
    by_load: bool = False  # whether requests in flight decide the scaling
    key: str = "autoscaling.target"  # key of the scaling target in the specification


@dataclass(frozen=True)
class Outlook:
    """The prediction for a deployment."""

    record: ArchiveRecord
    archive: str
    scaling: DeploymentScaling

    @property
    def in_flight(self) -> float:
        """The number of concurrent requests of one instance at its best.

        Little's law gives it for an open load.
        """
        best = self.record.best
        return (
            float(best.offered.connections)
            if best.offered.mode == "closed"
            else best.throughput * best.p50_ms / 1000
        )

    @property
    def fitting_target(self) -> int:
        """The scaling target that fits the measured capacity."""
        return max(1, math.floor(SCALING_FRACTION * self.in_flight))

    @property
    def alone_ms(self) -> float:
        """The duration of a request without batching."""
        curve = self._curve
        unbatched_ms = (
            next((point.median_ms for point in curve.points if point.batch_size == 1), None)
            if curve is not None
            else None
        )
        return unbatched_ms if unbatched_ms is not None else self.record.best.p50_ms

    @property
    def _curve(self) -> Curve | None:
        variant = Configuration(**self.record.best.configuration).variant
        return next((curve for curve in self.record.curves if curve.variant == variant), None)

    @property
    def machine(self) -> str:
        return describe(
            self.record.environment.cpu,
            self.record.environment.cores,
            tuple(self.record.environment.gpus),
        )

    def as_json(self) -> dict[str, Any]:
        best, curve = self.record.best, self._curve
        fewest, most = self.scaling[:2]
        return {
            "date": self.record.measured,
            "on": self.machine,
            "slo": self.record.slo,
            "configuration": best.configuration,
            "rps": best.throughput,
            "p50_ms": best.p50_ms,
            "p99_ms": best.p99_ms,
            "in_flight": round(self.in_flight, 2),
            "autoscaling_target": self.fitting_target,
            "alone_ms": self.alone_ms,
            "rps_of_all": None if fewest is None else best.throughput * fewest,
            "rps_of_most": None if most is None else best.throughput * most,
            "curve_ms": (
                {}
                if curve is None
                else {point.batch_size: point.median_ms for point in curve.points}
            ),
        }

    def lines(self) -> list[str]:
        best, bound = self.record.best, f" under {self.record.slo}" if self.record.slo else ""
        figures = (
            f"{rounded(best.throughput)} requests/s, p99 {milliseconds(best.p99_ms)}{bound}, with"
            f" {best.describes}"
        )
        lines = [f"measured {self.record.measured[:10]} on {self.machine}: {figures}"]
        curve = self._curve
        if curve is not None and curve.points:
            step = max(1, math.ceil(len(curve.points) / MAX_POINTS))
            points_text = ", ".join(
                f"{point.batch_size}: {point.median_ms:,.3g}" for point in curve.points[::step]
            )
            lines.append(f"      batches take (size: ms) {points_text}")
        fewest, most = self.scaling[:2]
        if fewest is not None:
            most = most if most != fewest else None
            max_text = f", {most} {rounded(most * best.throughput)}" if most is not None else ""
            noun = "instance" if fewest == 1 else "instances"
            total_text = (
                f"{fewest} {noun} like that machine: {rounded(fewest * best.throughput)}"
                f" requests/s{max_text}"
            )
            lines.append(f"      {total_text}; for another rate: tsx plan {self.archive} --rps N")
        return [*lines, *(f"      {line}" for line in self._advice())]

    def _advice(self) -> list[str]:
        scaling = self.scaling
        if scaling.fewest is None:
            return [
                f"an environment answers one request at a time: {rounded(1000 / self.alone_ms)}"
                " requests/s each on such a machine"
            ]
        if not scaling.by_load:
            return []
        capacity_text = f"one replica kept its bounds with {self.in_flight:.3g} requests in flight"
        if scaling.target is None:
            return [f"{capacity_text}: to scale, {scaling.key} = {self.fitting_target}"]
        if scaling.target > self.in_flight:
            return [
                f"{capacity_text}, and {scaling.key} = {scaling.target:g} lets more wait before a replica"
                f" starts: {self.fitting_target} fits"
            ]
        return []
