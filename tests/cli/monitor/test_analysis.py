"""`tsx monitor analyze` over recordings, without a server."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.monitor.test_baseline import record
from tsx_archiver import open_archive
from tsx_archiver.monitor.baseline import MEMBER


def test_drift_of_recorded_requests_is_found(run: Run, loan_model: Path, tmp_path: Path) -> None:
    def entry(number: int, shift: int) -> tuple[dict[str, object], dict[str, float]]:
        age = 20 + number * 7 % 50
        return {"age": age + shift, "sex": "fm"[number % 2]}, {
            "yes": age / 100,
            "no": 1 - age / 100,
        }

    baseline = record(tmp_path / "a.tsxrec", *(entry(number, 0) for number in range(400)))
    unmoved = record(tmp_path / "b.tsxrec", *(entry(number, 0) for number in range(290, 400)))
    older = record(tmp_path / "c.tsxrec", *(entry(number, 30) for number in range(110)))
    without = run("monitor analyze", loan_model, "--from", unmoved)
    assert (without.code, "`tsx monitor baseline" in without.err) == (1, True)
    assert run("monitor baseline", loan_model, "--input", baseline).code == 0
    unchanged = run("monitor analyze", loan_model, "--from", unmoved, "--json")
    assert unchanged.code == 0, unchanged.err + unchanged.out
    (version,) = json.loads(unchanged.out)["versions"]
    assert (version["version"], version["windows"], version["alarm"]) == ("1.0", 2, False)
    changed = run("monitor analyze", loan_model, "--from", older)
    assert changed.code == 3
    assert "110 samples, 2 windows; baseline" in changed.out
    first_row = changed.out.splitlines()[4]
    assert first_row.startswith("input.age")
    assert run("monitor analyze", loan_model, "--from", older, "--reference", unmoved).code == 2
    options = ("--reference", unmoved, "--evidently", "evidently.html")
    other = run("monitor analyze", loan_model, "--from", older, *options)
    if find_spec("evidently") is None:
        assert (other.code, "pip install evidently" in other.err) == (1, True)
    else:
        assert other.code == 3
        assert "input.age" in Path("evidently.html").read_text()

    with open_archive(loan_model) as archive:
        content = (archive.directory / MEMBER).read_bytes()
    Path("loan.json").write_bytes(content)
    assert run("monitor analyze loan.json --from", older).code == 3
    Path("damaged.json").write_text("{")
    damaged = run("monitor analyze damaged.json --from", older)
    assert (damaged.code, "Make it again" in damaged.err) == (1, True)
    Path("empty").mkdir()
    assert run("monitor analyze loan.json --from empty").code == 1

    without = run("monitor report", loan_model, "-o", "loan.html")
    assert (without.code, "give --from RECORDINGS" in without.err) == (2, True)
    page = run("monitor report", loan_model, "--from", older, "-o", "loan.html")
    assert page.code == 0, page.err
    html = Path("loan.html").read_text()
    assert "Drift: input.age (version 1.0)" in html
    assert "400 rows of a.tsxrec" in html


def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    for command in ("analyze", "report -o loan.html"):
        result = run(f"monitor {command} loan.mar --from recordings")
        assert (result.code, "pip install 'tsx-serve[monitor]'" in result.err) == (1, True)
