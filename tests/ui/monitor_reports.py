"""Reports on a monitored model, as its monitor process makes them, for tests of the web page."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Literal

import numpy as np

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.features.monitor.report import (
    AttributeGroups,
    CalibrationBin,
    ClassQuality,
    ColumnDrift,
    ColumnHistogram,
    Contest,
    Estimate,
    GroupDifference,
    GroupFigures,
    HistoryPoint,
    MonitorReport,
    Quality,
    VersionComparison,
    VersionReport,
)

NOW = 1_796_000_000.0  # seconds since 1970
HOUR = 3600.0
NUMBERS = (
    *("age", "income", "amount", "duration", "debt", "savings", "years_employed", "rent"),
    *("open_accounts", "late_payments", "utilization", "inquiries"),
)
CATEGORIES = {
    "purpose": ("car", "furniture", "education", "business", "holiday", "(others)"),
    "housing": ("own", "rent", "free"),
    "region": ("north", "south", "east", "west"),
    "channel": ("web", "branch", "phone"),
    "employment": ("employed", "self-employed", "unemployed", "retired"),
}
ANSWERS = ("approved", "review", "declined")
CONFIG = MonitorConfig(share=5, groups=("sex", "age_band"), positive="approved")


def estimate(share: float, count: int) -> Estimate:
    """Return a share with the normal approximation of its interval."""
    half = 1.96 * math.sqrt(max(share * (1 - share), 1e-6) / count)
    return Estimate(value=share, low=max(0, share - half), high=min(1, share + half), count=count)


def number_column(
    random: np.random.Generator, column: str, shift: float, *, previous: bool
) -> ColumnDrift:
    reference = np.sort(random.lognormal(3, 0.5, 20_000))
    edges = np.quantile(reference, np.arange(1, 64) / 64)

    def shares(values: Any) -> list[float]:
        return [
            float(share)
            for share in np.bincount(np.digitize(values, edges), minlength=64) / len(values)
        ]

    live = random.lognormal(3 + shift, 0.5, 1000)
    histogram = ColumnHistogram(
        edges=[round(float(edge), 3) for edge in edges],
        baseline=[1 / 64] * 64,
        live=shares(live),
        previous=shares(random.lognormal(3, 0.52, 1000)) if previous else None,
    )
    return drift_of(random, column, "number", shift, histogram)


def category_column(
    random: np.random.Generator, column: str, shift: float, *, previous: bool
) -> ColumnDrift:
    categories = CATEGORIES.get(column, ANSWERS)
    baseline = random.dirichlet(np.full(len(categories), 8.0))
    moved = baseline * np.exp(shift * 3 * np.linspace(1, -1, len(categories)))
    histogram = ColumnHistogram(
        categories=list(categories),
        baseline=[float(share) for share in baseline],
        live=[float(share) for share in moved / moved.sum()],
        previous=[float(share) for share in baseline[::-1]] if previous else None,
    )
    return drift_of(random, column, "category", shift, histogram)


def drift_of(
    random: np.random.Generator,
    column: str,
    kind: Literal["number", "category"],
    shift: float,
    histogram: ColumnHistogram,
) -> ColumnDrift:
    psi = abs(shift) + float(random.uniform(0, 0.02))
    alarm = psi >= CONFIG.min_drift
    history = [
        HistoryPoint(
            at=NOW - HOUR * (23 - hour),
            value=max(0, psi * min(1, hour / 16) + float(random.normal(0, 0.006))),
            count=1000,
        )
        for hour in range(24)
    ]
    return ColumnDrift(
        column=column,
        kind=kind,
        psi=psi,
        js=0.55 * math.sqrt(psi),
        test="ks" if kind == "number" else "chi2",
        statistic=0.03 + 0.6 * psi if kind == "number" else 6 + 300 * psi,
        p_value=1e-12 if alarm else float(random.uniform(0.02, 0.9)),
        alarm=alarm,
        alarm_since=NOW - 7 * HOUR if alarm else None,
        missing=0.031 if column == "income" else 0.0,
        baseline_missing=0.004 if column == "income" else 0.0,
        previous_psi=None if histogram.previous is None else psi / 2,
        histogram=histogram,
        history=history,
    )


def columns(seed: int, shifts: dict[str, float], *, previous: bool = True) -> list[ColumnDrift]:
    """Return 20 columns; those in `shifts` have drifted."""
    random = np.random.default_rng(seed)
    numbers = [f"input.{name}" for name in NUMBERS] + ["answer.confidence", "answer.entropy"]
    drifts = [
        number_column(random, name, shifts.get(name, 0.0), previous=previous) for name in numbers
    ]
    for name in [*CATEGORIES, "answer.class"]:
        column = category_column(random, name, shifts.get(name, 0.0), previous=previous)
        full = name if name.startswith("answer") else f"input.{name}"
        drifts.append(column.model_copy(update={"column": full}))
    return drifts


def quality(seed: int, accuracy: float, answers: int) -> Quality:
    random = np.random.default_rng(seed)
    days = [NOW - HOUR * 24 * (13 - day) for day in range(14)]
    return Quality(
        answers=answers,
        accuracy=estimate(accuracy, answers),
        classes=[
            ClassQuality(
                label=label,
                precision=estimate(accuracy - 0.03 * index, answers // (index + 2)),
                recall=estimate(accuracy + 0.02 - 0.04 * index, answers // (index + 2)),
            )
            for index, label in enumerate(ANSWERS)
        ],
        calibration=[
            CalibrationBin(
                confidence=0.05 + tenth / 10,
                accuracy=estimate((0.05 + tenth / 10) ** 1.2, 20 + 40 * tenth),
            )
            for tenth in range(3, 10)
        ],
        calibration_error=0.041,
        history=[
            HistoryPoint(
                at=at,
                count=answers // 14,
                value=(day := estimate(value, answers // 14)).value or 0,
                low=day.low,
                high=day.high,
            )
            for at in days
            for value in [accuracy + float(random.normal(0, 0.008))]
        ],
    )


def groups(seed: int) -> list[AttributeGroups]:
    random = np.random.default_rng(seed)

    def figures(group: str, count: int, rate: float, error: float) -> GroupFigures:
        return GroupFigures(
            group=group,
            count=count,
            selection_rate=estimate(rate, count),
            error=estimate(error, count // 3),
            false_positives=estimate(error * 0.8, count // 6),
            false_negatives=estimate(error * 1.3, count // 6),
            confidence=float(random.uniform(0.8, 0.9)),
        )

    def difference(name: Any, value: float, pair: tuple[str, str], half: float) -> GroupDifference:
        interval = Estimate(value=value, low=value - half, high=value + half, count=3000)
        return GroupDifference(name=name, difference=interval, groups=pair)

    return [
        AttributeGroups(
            attribute="sex",
            positive="approved",
            groups=[figures("f", 2810, 0.41, 0.12), figures("m", 3204, 0.53, 0.06)],
            differences=[
                difference("demographic_parity", 0.12, ("m", "f"), 0.025),
                difference("equal_opportunity", 0.078, ("f", "m"), 0.04),
                difference("error", 0.06, ("f", "m"), 0.02),
            ],
        ),
        AttributeGroups(
            attribute="age_band",
            positive="approved",
            groups=[
                figures("18-25", 410, 0.44, 0.09),
                figures("26-45", 3120, 0.49, 0.08),
                figures("46-65", 2200, 0.5, 0.08),
            ],
            hidden=1,
            differences=[difference("demographic_parity", 0.06, ("46-65", "18-25"), 0.07)],
        ),
    ]


def full_report() -> MonitorReport:
    """Return a report with three versions, 20 columns each, alarms, quality and groups."""
    moved = {"input.income": 0.42, "input.amount": 0.19, "purpose": 0.27, "answer.class": 0.12}
    shared = {"baseline": "archive", "baseline_rows": 20_000, "first": NOW - 14 * 24 * HOUR}
    return MonitorReport(
        model="credit",
        monitoring=True,
        config=CONFIG,
        samples=61_204,
        dropped={"slow": 12, "size": 0},
        contests=1,
        versions=[
            VersionReport(
                version="3.0",
                last=NOW,
                samples=30_412,
                windows=30,
                window_samples=412,
                drift=0.44,
                alarm=True,
                columns=columns(1, moved),
                quality=quality(1, 0.957, 4200),
                groups=groups(1),
                **shared,
            ),
            VersionReport(
                version="2.0",
                last=NOW,
                samples=30_100,
                windows=30,
                window_samples=100,
                drift=0.02,
                columns=columns(2, {}),
                quality=quality(2, 0.938, 4150),
                groups=groups(2),
                **shared,
            ),
            VersionReport(
                version="1.0",
                first=NOW - 40 * 24 * HOUR,
                last=NOW - 30 * 24 * HOUR,
                samples=692,
                window_samples=692,
                problem="The archive has no baseline, and no window has ended.",
            ),
        ],
        comparisons=[
            VersionComparison(
                metric="accuracy",
                old="2.0",
                new="3.0",
                difference=Estimate(value=0.019, low=0.006, high=0.032, count=8350),
                better="3.0",
                sentence=(
                    "Version 3.0 is better than 2.0: its accuracy is higher by 1.9 percentage"
                    " points (0.6 to 3.2, 95 % confidence at any time), on 8,350 answers."
                ),
            )
        ],
    )


def contests() -> list[Contest]:
    return [
        Contest(
            id="c2",
            model="credit",
            version="3.0",
            request_id="4a1f0c9e-11",
            at=NOW - 2 * HOUR,
            reason="The debt that was counted belongs to my brother.",
            prediction="declined",
            state="open",
        ),
        Contest(
            id="c1",
            model="credit",
            version="2.0",
            request_id="4a1f0c9e-07",
            at=NOW - 30 * HOUR,
            answered_at=NOW - 20 * HOUR,
            reason="I have repaid the loan of 2024.",
            prediction="declined",
            state="corrected",
            response="The repayment had been missing in the register.",
            truth="approved",
        ),
    ]


def worst_answers() -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"4a1f0c9e-2{number}",
            "version": "3.0",
            "row": 0,
            "at": NOW - number * HOUR,
            "prediction": "approved",
            "truth": "declined",
            "confidence": 0.99 - number / 50,
            "error": None,
            "truth_at": NOW,
        }
        for number in range(4)
    ]


def recorded_request() -> dict[str, Any]:
    body = {"age": 31, "income": 2100, "amount": 9000, "purpose": "car"}
    answer = {"approved": 0.08, "review": 0.11, "declined": 0.81}
    return {
        "request_id": "4a1f0c9e-11",
        "answers": [],
        "recorded": {
            "at": NOW,
            "version": "3.0",
            "headers": [["Content-Type", "application/json"]],
            "body": base64.b64encode(json.dumps(body).encode()).decode(),
            "answer_headers": [["content-type", "application/json"]],
            "answer": base64.b64encode(json.dumps(answer).encode()).decode(),
        },
    }
