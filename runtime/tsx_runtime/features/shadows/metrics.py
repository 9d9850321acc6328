"""The metrics of shadows in `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable

from tsx_runtime.feature import Families
from tsx_runtime.features.shadows.mirror import Mirror


def add_shadows(families: Families, mirrors: Iterable[Mirror], host: str) -> None:
    """Add the metrics of shadows."""
    for mirror in mirrors:
        report = mirror.report
        model = {"model_name": mirror.name, "model_version": mirror.number, "hostname": host}
        results = {
            "agreed": report.agreed,
            "disagreed": report.disagreed,
            "uncompared": report.uncompared,
        }
        text = "copies of requests, by what the comparison of the answers said"
        families.add_by("result", "tsx_shadow_requests_total", text, model, results)
        text = "requests of the share that were not copied, or that the shadow refused"
        shed = dict(sorted(report.shed.items()))
        families.add_by("reason", "tsx_shadow_shed_total", text, model, shed)
        text = "answers of 500 and more, of the requests that were compared"
        errors = {"primary": report.primary_errors, "shadow": report.shadow_errors}
        families.add_by("side", "tsx_shadow_errors_total", text, model, errors)
