"""The prediction from an archive's benchmark: throughput, and the load at which to scale.

Figures apply to machines like the measured one, so they are shown with that machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Curve
from tsx_cli.bench.report.archive_record import ArchiveRecord
from tsx_cli.common.output import milliseconds, rounded
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.core.placement.hardware import describe

SCALING_FRACTION = 0.8  # fraction of an instance's capacity at which another should start
MAX_POINTS = 6  # number of points of the curve that are shown


@dataclass(frozen=True)
class Outlook:
    """The prediction for a deployment.

    `fewest` and `most` are numbers of instances, or None if the target has no instances.
    """

    record: ArchiveRecord
    archive: str
    fewest: int | None
    most: int | None
    target: float | None  # the scaling target in the specification
    scales_by_load: bool = True  # whether requests in flight decide the scaling
    key: str = "autoscaling.target"  # key of the scaling target in the specification

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
        data: dict[str, Any] = {
            "date": self.record.measured,
            "on": self.machine,
            "slo": self.record.slo,
            "configuration": best.configuration,
        }
        data |= {
            "rps": best.throughput,
            "p50_ms": best.p50_ms,
            "p99_ms": best.p99_ms,
            "in_flight": round(self.in_flight, 2),
        }
        data |= {"autoscaling_target": self.fitting_target, "alone_ms": self.alone_ms}
        data["rps_of_all"] = None if self.fewest is None else best.throughput * self.fewest
        data["rps_of_most"] = None if self.most is None else best.throughput * self.most
        data["curve_ms"] = (
            {} if curve is None else {point.batch_size: point.median_ms for point in curve.points}
        )
        return data

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
        if self.fewest is not None:
            most = self.most if self.most not in (None, self.fewest) else None
            max_text = f", {most} {rounded(most * best.throughput)}" if most is not None else ""
            noun = "instance" if self.fewest == 1 else "instances"
            total_text = (
                f"{self.fewest} {noun} like that machine: {rounded(self.fewest * best.throughput)}"
                f" requests/s{max_text}"
            )
            lines.append(f"      {total_text}; for another rate: tsx plan {self.archive} --rps N")
        return [*lines, *(f"      {line}" for line in self._scaling())]

    def _scaling(self) -> list[str]:
        if self.fewest is None:
            return [
                f"an environment answers one request at a time: {rounded(1000 / self.alone_ms)}"
                " requests/s each on such a machine"
            ]
        if not self.scales_by_load:
            return []
        capacity_text = f"one replica kept its bounds with {self.in_flight:.3g} requests in flight"
        if self.target is None:
            return [f"{capacity_text}: to scale, {self.key} = {self.fitting_target}"]
        if self.target > self.in_flight:
            return [
                f"{capacity_text}, and {self.key} = {self.target:g} lets more wait before a replica"
                f" starts: {self.fitting_target} fits"
            ]
        return []


def outlook(record: ArchiveRecord | None, spec: DeploySpec) -> Outlook | None:
    """Return the prediction, or None if the archive was never measured."""
    if record is None:
        return None
    fewest, most, target = _instances(spec)
    scales_by_load = spec.target == "sagemaker" and spec.sagemaker.multi_model is None
    key = "autoscaling.target"
    if spec.target == "ray":  # tsx sets a missing target to a fitting one.
        scales_by_load, key = target is not None, "ray.target_ongoing_requests"
    return Outlook(record, spec.model.name, fewest, most, target, scales_by_load, key)


def _instances(spec: DeploySpec) -> tuple[int | None, int | None, float | None]:
    endpoint = spec.sagemaker
    if spec.target == "container":
        return 1, None, None
    if spec.target == "ray":
        min_replicas = spec.ray.min_replicas
        return (
            spec.ray.replicas if min_replicas is None else max(1, min_replicas),
            spec.ray.max_replicas,
            spec.ray.target_ongoing_requests,
        )
    if spec.target == "kubernetes":
        pod = spec.kubernetes
        return pod.replicas, pod.most_replicas if pod.most_replicas > pod.replicas else None, None
    if spec.target == "lambda" or endpoint.serverless is not None:
        return None, None, None
    if endpoint.component is not None and endpoint.autoscaling is None:
        return endpoint.component.copies, None, None
    if endpoint.autoscaling is not None:
        return endpoint.autoscaling.min, endpoint.autoscaling.max, endpoint.autoscaling.target
    return endpoint.instances, None, None
