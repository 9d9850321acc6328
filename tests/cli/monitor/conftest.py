"""A small model of loans, and a table of its requests."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.models import make_model

LOANS = """
def handle(data, context):
    if data is None:
        return None
    return [answer(row.get("body") or row.get("data"), context) for row in data]


def answer(row, context):
    if context.get_request_header(0, "explain") == "True":
        return {"age": 0.01 * row["age"], "city": 0.1}
    if row["age"] < 0:
        raise ValueError("no age is negative")
    share = 0.9 if row["age"] > 40 or context.manifest["model"]["modelVersion"] == "2.0" else 0.2
    return {"yes": share, "no": 1 - share}
"""
CONFIG = "monitor: {share: 100%, groups: [sex], positive: 'yes', windowSamples: 60}\n"


def loan_rows(count: int) -> list[dict[str, object]]:
    """Return requests; `customer` is different in each, and two cities are rare."""
    return [
        {
            "customer": f"customer-{number:04}",
            "age": 20 + number % 50,
            "income": 2000.5 + 7 * (number % 97),
            "city": "Bern" if number % 3 else "Rome" if number > 5 else f"Hamlet {number}",
            "sex": "fm"[number % 2],
        }
        for number in range(count)
    ]


def right_answer(row: dict[str, object]) -> str:
    return "yes" if int(str(row["age"])) > 40 else "no"


@pytest.fixture
def loan_model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "loan.mar", LOANS, config=CONFIG)


@pytest.fixture
def loan_table(tmp_path: Path) -> Path:
    path = tmp_path / "loans.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(loan_rows(1)[0]))
        writer.writeheader()
        writer.writerows(loan_rows(300))
    return path
