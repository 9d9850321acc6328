"""`tsx monitor`, `tsx models monitor` and `tsx feedback` against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Answering, Run
from tests.cli.monitor.conftest import CONFIG, LOANS, loan_rows, right_answer
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_client import Client

COUNT = 240


@pytest.fixture
def served(processes: None, tmp_path: Path) -> Iterator[RunningServer]:
    store = tmp_path / "store"
    for version in ("1.0", "2.0"):
        path = store / f"loan-{version}.mar"
        make_model(path, LOANS, name="loan", version=version, config=CONFIG)
    with running_server(make_settings(store)) as running:
        for version in ("1.0", "2.0"):
            running.register(f"loan-{version}.mar", initial_workers=1)
        yield running


@pytest.mark.slow
def test_truth_reaches_comparisons_contests_and_the_report(
    served: RunningServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_INFERENCE_ADDRESS", str(served.inference.base_url))
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", str(served.management.base_url))
    assert run("models traffic loan 1.0=50 2.0=50").code == 0
    assert run("models record loan --share 100% --answers").code == 0
    assert "100 % of the requests are examined" in run("models monitor loan").out
    missing = run("monitor compare loan")
    assert (missing.code, "truth of answers of both" in missing.err) == (1, True)
    lines, ids = ["request_id,truth,groups.sex,comment"], []
    for row in loan_rows(COUNT):
        answer = served.inference.post("/predictions/loan", json=row)
        assert answer.status_code == 200, answer.text
        ids.append(answer.headers["x-request-id"])
        lines.append(f"{ids[-1]},{right_answer(row)},{row['sex']},late")
    Path("truth.csv").write_text("\n".join([*lines[:1], *lines[11:], "nobody,yes,f,"]))

    with Client(str(served.inference.base_url)) as client:
        items = [
            {"request_id": id, "truth": right_answer(row)}
            for id, row in zip(ids[:10], loan_rows(10), strict=True)
        ]
        assert client.models.loan.feedback(items)["accepted"] == 10
        assert client.feedback("loan", items[0])["duplicates"] == 1
        contest = {"request_id": ids[0], "contest": {"reason": "I am <b>older</b>"}}
        assert client.feedback("loan", [contest])["accepted"] == 1
    first = run("feedback truth.csv")
    assert first.code == 1
    assert f"{COUNT - 10} items stored, 0 were stored before, 1 failed" in first.out
    assert re.search(r"truth.csv:232: .*nobody", first.err)
    again = json.loads(run("feedback truth.csv --model loan --json").out)
    assert (again["accepted"], again["duplicates"]) == (0, COUNT - 10)
    assert again["errors"][0]["code"] == "unknown_request"

    compared = run("monitor compare loan --versions 1.0,2.0 --metric accuracy --watch")
    assert (compared.code, "Version 1.0 is better" in compared.out) == (0, True)
    assert run("monitor compare loan --versions 2.0,1.0").code == 1
    shown = run("monitor show loan").out
    assert "accuracy 1.00" in shown
    assert "demographic_parity" in shown

    (open_contest,) = json.loads(run("monitor contests loan --json").out)
    contest_id = open_contest["id"]
    explained = run("monitor contests loan --explain", contest_id)
    assert json.loads(explained.out)["explanation"] == {"age": 0.2, "city": 0.1}
    for option in ("--explain none", "--answer none --state upheld"):
        unknown = run(f"monitor contests loan {option}")
        assert (unknown.code, "no contest none" in unknown.err) == (1, True)
    assert run("monitor contests loan --answer", contest_id).code == 2
    answer_options = ("--state", "upheld", "--response", "The age is that of the form.")
    answered = run("monitor contests loan --answer", contest_id, *answer_options)
    assert (answered.code, "upheld" in answered.out) == (0, True)
    assert "no contested answer waits" in run("monitor contests loan").out
    assert contest_id in run("monitor contests loan --all").out

    archive = tmp_path / "store" / "loan-2.0.mar"
    written = run("monitor report loan -o loan.html --archive", archive)
    assert written.code == 0, written.err
    page = Path("loan.html").read_text()
    assert "Version 1.0 is better" in page
    assert "&lt;b&gt;older" in page
    assert '"city": ' in page.replace("&#34;", '"')  # a recorded request
    assert "handler.py" in page
    assert not re.search(r"<(script|link|iframe)|\b(src|href)=\"(?!data:image/|#)", page)
    off = run("models monitor loan --off")
    assert (off.code, "not monitored" in off.out) == (0, True)
    assert "not monitored; `tsx models monitor loan" in run("monitor show loan").out
    Path("monitor.yaml").write_text("share: 10%\n")
    assert "10 % of" in run("models monitor loan --file monitor.yaml").out
    assert run("models monitor loan --file monitor.yaml --off").code == 2
    Path("monitor.yaml").write_text("- 1\n")
    wrong = run("models monitor loan --file monitor.yaml")
    assert (wrong.code, "such as share" in wrong.err) == (2, True)


def test_a_comparison_without_a_decision_exits_with_3(run: Run, answering: Answering) -> None:
    comparison = {"metric": "accuracy", "old": "1", "new": "2", "better": None, "sentence": "Wait."}
    body = json.dumps({"model": "loan", "comparisons": [comparison]}).encode()
    result = run(f"monitor compare loan --url {answering(200, body)}")
    assert (result.code, result.out) == (3, "Wait.\n")
