"""Applies an archive's benchmark to a deployment: the throughput of its instances, and the load at
which to scale.

Figures of one machine hold for machines like it, so they are shown with the machine they were
measured on.
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

SHARE = 0.8  # of what one instance answered within its bounds: where another one should come
SHOWN = 6  # points of the curve


@dataclass(frozen=True)
class Outlook:
    """`fewest` and `most` are instances; None where the target counts none. `in_flight` is of one,
    at its best.
    """

    kept: ArchiveRecord
    archive: str
    fewest: int | None
    most: int | None
    target: float | None  # of scaling, as it is asked for
    scales: bool = True  # by requests in flight
    key: str = "autoscaling.target"

    @property
    def in_flight(self) -> float:
        """Requests at a time, by Little's law where they came at a rate."""
        best = self.kept.best
        return (
            float(best.offered.connections)
            if best.offered.mode == "closed"
            else best.throughput * best.p50_ms / 1000
        )

    @property
    def fitting_target(self) -> int:
        return max(1, math.floor(SHARE * self.in_flight))

    @property
    def alone_ms(self) -> float:
        """How long the model works on one request by itself."""
        curve = self._curve
        first = (
            next((point.median_ms for point in curve.points if point.batch_size == 1), None)
            if curve is not None
            else None
        )
        return first if first is not None else self.kept.best.p50_ms

    @property
    def _curve(self) -> Curve | None:
        variant = Configuration(**self.kept.best.configuration).variant
        return next((curve for curve in self.kept.curves if curve.variant == variant), None)

    @property
    def where(self) -> str:
        return describe(
            self.kept.environment.cpu,
            self.kept.environment.cores,
            tuple(self.kept.environment.gpus),
        )

    def as_json(self) -> dict[str, Any]:
        best, curve = self.kept.best, self._curve
        data: dict[str, Any] = {
            "date": self.kept.measured,
            "on": self.where,
            "slo": self.kept.slo,
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
        best, bound = self.kept.best, f" under {self.kept.slo}" if self.kept.slo else ""
        figures = (
            f"{rounded(best.throughput)} requests/s, p99 {milliseconds(best.p99_ms)}{bound}, with"
            f" {best.describes}"
        )
        lines = [f"measured {self.kept.measured[:10]} on {self.where}: {figures}"]
        curve = self._curve
        if curve is not None and curve.points:
            step = max(1, math.ceil(len(curve.points) / SHOWN))
            shown = ", ".join(
                f"{point.batch_size}: {point.median_ms:,.3g}" for point in curve.points[::step]
            )
            lines.append(f"      batches take (size: ms) {shown}")
        if self.fewest is not None:
            most = self.most if self.most not in (None, self.fewest) else None
            upto = f", {most} {rounded(most * best.throughput)}" if most is not None else ""
            word = "instance" if self.fewest == 1 else "instances"
            together = (
                f"{self.fewest} {word} like that machine: {rounded(self.fewest * best.throughput)}"
                f" requests/s{upto}"
            )
            lines.append(f"      {together}; for another rate: tsx plan {self.archive} --rps N")
        return [*lines, *(f"      {line}" for line in self._scaling())]

    def _scaling(self) -> list[str]:
        if self.fewest is None:
            return [
                f"an environment answers one request at a time: {rounded(1000 / self.alone_ms)}"
                " requests/s each on such a machine"
            ]
        if not self.scales:
            return []
        held = f"one replica kept its bounds with {self.in_flight:.3g} requests in flight"
        if self.target is None:
            return [f"{held}: to scale, {self.key} = {self.fitting_target}"]
        if self.target > self.in_flight:
            return [
                f"{held}, and {self.key} = {self.target:g} lets more wait before a replica starts:"
                f" {self.fitting_target} fits"
            ]
        return []


def outlook(kept: ArchiveRecord | None, spec: DeploySpec) -> Outlook | None:
    """None where the archive was never measured."""
    if kept is None:
        return None
    fewest, most, target = _instances(spec)
    scales = spec.target == "sagemaker" and spec.sagemaker.multi_model is None
    key = "autoscaling.target"
    if spec.target == "ray":  # where none is set, the one that fits is taken
        scales, key = target is not None, "ray.target_ongoing_requests"
    return Outlook(kept, spec.model.name, fewest, most, target, scales, key)


def _instances(spec: DeploySpec) -> tuple[int | None, int | None, float | None]:
    own = spec.sagemaker
    if spec.target == "container":
        return 1, None, None
    if spec.target == "ray":
        scaled = spec.ray.min_replicas
        return (
            spec.ray.replicas if scaled is None else max(1, scaled),
            spec.ray.max_replicas,
            spec.ray.target_ongoing_requests,
        )
    if spec.target == "kubernetes":
        pod = spec.kubernetes
        return pod.replicas, pod.most_replicas if pod.most_replicas > pod.replicas else None, None
    if spec.target == "lambda" or own.serverless is not None:
        return None, None, None
    if own.component is not None and own.autoscaling is None:
        return own.component.copies, None, None
    if own.autoscaling is not None:
        return own.autoscaling.min, own.autoscaling.max, own.autoscaling.target
    return own.instances, None, None
