"""`tsx monitor baseline` with real archives, and the models of some on real workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.monitor.conftest import loan_rows, right_answer
from tsx_archiver import open_archive, verify_archive
from tsx_archiver.monitor.baseline import MEMBER, MonitorBaseline, read_baseline
from tsx_runtime.recordings import Recorded, encode, file_head


def baseline_of(model: Path) -> MonitorBaseline:
    with open_archive(model) as archive:
        baseline = read_baseline(archive.directory)
    assert baseline is not None
    return baseline


def record(path: Path, *entries: tuple[Any, Any]) -> Path:
    """Write a recording of JSON requests and their JSON answers."""
    recorded = (
        Recorded(
            1e9 + number,
            "1.0",
            "",
            [("Content-Type", "application/json")],
            json.dumps(body).encode(),
            200,
            0.01,
            [("content-type", "application/json")],
            None if answer is None else json.dumps(answer).encode(),
        )
        for number, (body, answer) in enumerate(entries)
    )
    path.write_bytes(file_head("loan") + b"".join(map(encode, recorded)))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_baseline_has_inputs_and_answers_without_personal_data(
    run: Run, loan_model: Path, loan_table: Path, tmp_path: Path
) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{right_answer(row)}\n" for row in loan_rows(300)))
    result = run(
        "monitor baseline", loan_model, "--input", loan_table, "--labels", labels, "--rows", 200
    )
    assert result.code == 0, result.err
    assert "200 rows" in result.out
    assert "age       number" in result.out
    assert "accuracy 1.00" in result.out
    baseline = baseline_of(loan_model)
    assert baseline.fields == {
        "customer": "category",
        "age": "number",
        "income": "number",
        "city": "category",
        "sex": "category",
    }
    assert (baseline.source, baseline.accuracy) == ("loans.csv", 1.0)
    # The requests come from the whole file, not from its first 200 lines.
    assert baseline.columns["input.age"].count == 200
    assert {"answer.class", "answer.confidence"} <= baseline.columns.keys()
    verify_archive(loan_model)
    with open_archive(loan_model) as archive:
        content = (archive.directory / MEMBER).read_text()
    assert len(content) < 20_000
    assert "customer-" not in content
    assert "Hamlet" not in content
    assert "(others)" in content


def test_recorded_answers_need_no_model(run: Run, loan_model: Path, tmp_path: Path) -> None:
    vectors = [[number % 3 - 5.0, 3.0, *[0.0] * 38] for number in range(60)]
    path = record(tmp_path / "loan.tsxrec", *(({"age": 30}, vector) for vector in vectors))
    result = run("monitor baseline", loan_model, "--input", path, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["rows"] == 60
    baseline = baseline_of(loan_model)
    assert baseline.columns["answer.similarity"].count == 60
    assert baseline.centres["answer.similarity"][:3] == [-4.0, 3.0, 0.0]


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_failed_requests_are_left_out_and_reported(
    run: Run, loan_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "loans.jsonl"
    path.write_text('{"age": 30}\n{"age": -1}\nno json\n{"age": 50}\n')
    result = run("monitor baseline", loan_model, "--input", path)
    assert result.code == 0, result.err
    assert "has a baseline of 2 rows" in result.out
    assert "requests left out: " in result.out
    path.write_text('{"age": -1}\n')
    failed = run("monitor baseline", loan_model, "--input", path)
    assert (failed.code, "no request can be used" in failed.err) == (1, True)


def test_fields_are_corrected_by_a_file(run: Run, loan_model: Path, loan_table: Path) -> None:
    command = ("monitor baseline --no-answers --input", loan_table, loan_model, "--fields")
    Path("fields.json").write_text('{"customer": "ignore", "age": "category"}')
    assert run(*command, "fields.json").code == 0
    baseline = baseline_of(loan_model)
    assert baseline.fields["age"] == "category"
    assert baseline.columns["input.age"].kind == "category"
    assert not [column for column in baseline.columns if "customer" in column or "answer" in column]
    Path("fields.json").write_text('{"age": "integer"}')
    wrong = run(*command, "fields.json")
    assert (wrong.code, "number, category, text" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("short.txt", "yes\n", "has 1 labels, and the input has 300 requests"),
        ("two.csv", "id,answer\n1,yes\n", "has the column `label`"),
        ("broken.jsonl", "{\n", "has the column `label`"),
    ],
)
def test_unusable_labels_are_refused_before_the_model_runs(
    run: Run, loan_model: Path, loan_table: Path, name: str, content: str, error: str
) -> None:
    Path(name).write_text(content)
    result = run("monitor baseline", loan_model, "--input", loan_table, "--labels", name)
    assert (result.code, error in result.err) == (2, True)


def test_labels_of_numbers_give_the_mean_error(run: Run, loan_model: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "loan.tsxrec", *(({"age": 30 + n}, n + 0.5) for n in range(60)))
    Path("labels.csv").write_text("label,note\n" + "".join(f"{n}.25,x\n" for n in range(60)))
    result = run("monitor baseline", loan_model, "--input", path, "--labels", "labels.csv")
    assert result.code == 0, result.err
    assert baseline_of(loan_model).mean_error == pytest.approx(0.25)


def test_an_input_without_requests_is_an_error(run: Run, loan_model: Path) -> None:
    Path("empty.jsonl").write_text("")
    for name in ("empty.jsonl", "absent.csv", "bad.tsxrec"):
        if name.startswith("bad"):
            Path(name).write_text("PK")
        result = run("monitor baseline", loan_model, "--input", name)
        assert (result.code, result.err != "") == (1, True)
        assert "bug" not in result.err
