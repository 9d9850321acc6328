"""Models for tables, whose answers must equal those of their libraries."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.served_model import a_context, a_served_model, answers_of
from tsx_runtime.core.workers.signature import read_signature
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.metrics import Metrics

pd = pytest.importorskip("pandas")
pytest.importorskip("skops")

from tests.runtime.features.tabular.conftest import SPECIES, iris, people  # noqa: E402
from tsx_runtime.features.tabular.worker import models  # noqa: E402
from tsx_runtime.features.tabular.worker.handler import TabularHandler  # noqa: E402

JSON, CSV = "application/json", "text/csv"
ROWS = [[5.1, 3.5, 1.4, 0.2], [6.3, 2.5, 5.0, 1.9]]
RECORDS = [dict(zip("abcd", row, strict=True)) for row in ROWS]


class Loaded:
    """A handler that has loaded a file, called like in a worker."""

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        self.context = a_context(
            manifest={"model": {"serializedFile": path.name}}, metrics=Metrics("m")
        )
        self.context.system_properties.update(model_dir=str(path.parent), trust_pickle=trust)
        self.handler = TabularHandler()
        self.handler.initialize(self.context)
        self.model = a_served_model(
            self.handler.handle, self.handler, context=self.context, decode=False
        )

    def ask(self, *bodies: Any, kind: str | None = JSON) -> list[tuple[int, Any]]:
        """Answer a batch of requests."""
        contents = [
            bytearray(body if isinstance(body, bytes) else json.dumps(body).encode())
            for body in bodies
        ]
        headers = [] if kind is None else [(b"content-type", kind.encode())]
        answers = answers_of(self.model, *contents, headers=headers)
        return [(status, json.loads(body)) for status, _, body in answers]

    def answer(self, body: Any, kind: str | None = JSON) -> Any:
        ((status, answer),) = self.ask(body, kind=kind)
        assert status == 200, answer
        return answer


def parquet() -> bytes:
    pytest.importorskip("pyarrow")
    file = io.BytesIO()
    pd.DataFrame(RECORDS).to_parquet(file)
    return file.getvalue()


FORMS: dict[str, Any] = {
    "records": (RECORDS, JSON),
    "rows": (ROWS, JSON),
    "split": ({"columns": list("dcba"), "data": [row[::-1] for row in ROWS]}, JSON),
    "csv": (b"d,a,b,c\n0.2,5.1,3.5,1.4\n1.9,6.3,2.5,5.0\n", CSV),
    "parquet": (parquet, None),
}


@pytest.fixture(scope="module")
def forest(saved: Path) -> Loaded:
    return Loaded(saved / "forest.skops")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_table_gets_the_predictions_of_the_model(
    forest: Loaded, estimators: dict[str, Any], form: str
) -> None:
    body, kind = FORMS[form]
    answers = forest.answer(body() if callable(body) else body, kind)
    frame = pd.DataFrame(RECORDS)
    assert [answer["prediction"] for answer in answers] == ["setosa", "virginica"]
    probabilities = estimators["forest"].predict_proba(frame)
    assert [answer["probabilities"] for answer in answers] == [
        dict(zip(SPECIES, row, strict=True)) for row in probabilities
    ]


def test_a_single_row_gets_an_object(forest: Loaded) -> None:
    for body in (RECORDS[0], ROWS[0]):
        assert forest.answer(body)["prediction"] == "setosa"
    assert forest.answer([]) == []
    form = b"--x\r\n" + b"\r\n--x\r\n".join(
        b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % (name.encode(), b"1")
        for name in "abcd"
    )
    answer = forest.answer(form + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")
    assert answer["prediction"] in SPECIES


def test_one_call_predicts_for_all_rows_of_a_batch(saved: Path) -> None:
    loaded = Loaded(saved / "forest.skops")
    predict, sizes = loaded.handler.table.predict, list[int]()

    def counted(frame: Any) -> Any:
        sizes.append(len(frame))
        return predict(frame)

    loaded.handler.table = loaded.handler.table._replace(predict=counted)
    wrong = {**RECORDS[0], "a": "wide"}
    answers = loaded.ask(RECORDS[0], RECORDS, wrong, ROWS[1], [], ROWS, RECORDS[1], RECORDS[0])
    assert [status for status, _ in answers] == [200, 200, 422, 200, 200, 200, 200, 200]
    assert sizes == [8]
    predictions = [
        answer["prediction"]
        if isinstance(answer, dict)
        else [record["prediction"] for record in answer]
        for status, answer in answers
        if status == 200
    ]
    first, second = "setosa", "virginica"
    assert predictions == [first, [first, second], second, [], [first, second], second, first]


PERSON = {"age": 30, "city": "Ulm", "zip": "01", "paid": True}


@pytest.mark.parametrize(
    ("model", "body", "details"),
    [
        ("mixed", {**PERSON, "age": "x"}, [("float_parsing", ["body", "age"], "x")]),
        ("mixed", [PERSON, {**PERSON, "city": "Rom"}], [("literal_error", ["body", 1, "city"], "Rom")]),
        ("mixed", [{**PERSON, "city": None}], [("literal_error", ["body", 0, "city"], None)]),
        ("mixed", {"age": 1, "city": "Ulm", "zip": "1"}, [("missing", ["body", "paid"], ...)]),
        ("mixed", {**PERSON, "more": 1}, [("extra_forbidden", ["body", "more"], 1)]),
        ("mixed", [["x", "Ulm", "01"]], [("value_error", ["body", 0], ...)]),
        ("forest", [1, 2, 3, 4, 5], [("value_error", ["body"], [1, 2, 3, 4, 5])]),
        ("forest", [1, 2, 3, float("nan")], [("finite_number", ["body", "d"], ...)]),
        ("nameless", [[1, 2, 3, None]], [("float_type", ["body", 0, "3"], None)]),
        ("forest", b"{", [("value_error", ["body"], None)]),
        ("forest", {"inputs": [{"name": "a", "datatype": "F", "shape": [1], "data": 1}]}, [("value_error", ["body", "inputs"], None)]),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_the_columns_are_refused_with_details(
    saved: Path, model: str, body: Any, details: list[Any]
) -> None:
    ((status, answer),) = Loaded(saved / f"{model}.skops").ask(body)
    assert status == 422
    assert [(fault["type"], fault["loc"]) for fault in answer["detail"]] == [
        (kind, location) for kind, location, _ in details
    ]
    for fault, (_, _, value) in zip(answer["detail"], details, strict=True):
        assert fault["msg"]
        assert value is ... or fault["input"] == value


def test_a_long_table_of_faults_gets_some_details(forest: Loaded) -> None:
    ((status, answer),) = forest.ask([["x"] * 4] * 1000)
    assert (status, len(answer["detail"])) == (422, 100)


@pytest.mark.parametrize("model", ["mixed", "by_dtype", "nameless", "two"])
def test_estimators_get_the_columns_that_they_were_fitted_with(
    saved: Path, estimators: dict[str, Any], model: str
) -> None:
    # The preprocessing of HistGradientBoosting is a function, which skops does not trust.
    loaded = Loaded(saved / f"{model}.skops", trust=model == "by_dtype")
    estimator = estimators[model]
    if model in ("nameless", "two"):
        frame = pd.DataFrame(RECORDS)
        rows: Any
        rows, frame = (ROWS, frame.to_numpy()) if model == "nameless" else (RECORDS, frame)
    else:
        frame = people().head(20)
        frame.loc[3, "age"] = np.nan
        frame = frame if model == "mixed" else frame.drop(columns="zip")
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        if model == "by_dtype":
            frame = frame.astype({"city": pd.CategoricalDtype(["Bern", "Linz", "Ulm"])})
    answers = loaded.answer(rows)
    expected = estimator.predict(frame).tolist()
    assert [answer["prediction"] for answer in answers] == expected
    # The probabilities of several outputs are not shown.
    assert ("probabilities" in answers[0]) == (model in ("mixed", "by_dtype"))
    if "probabilities" in answers[0]:
        assert [list(answer["probabilities"].values()) for answer in answers] == [
            pytest.approx(row) for row in estimator.predict_proba(frame).tolist()
        ]


def test_texts_of_csv_stay_texts_for_columns_of_text(saved: Path) -> None:
    loaded = Loaded(saved / "mixed.skops")
    (answer,) = loaded.answer(b"age,city,zip,paid\n30,Ulm,01,True\n", CSV)
    assert answer == loaded.answer(PERSON)
    assert answer != loaded.answer({**PERSON, "zip": "1"})


@pytest.mark.parametrize("name", ["flowers.json", "number.ubj", "categories.ubj", "hinge.json"])
def test_models_of_xgboost_answer_as_the_library(
    saved: Path, boosters: dict[str, Any], name: str
) -> None:
    loaded, model = Loaded(saved / name), boosters[name]
    if name == "categories.ubj":
        table = people()
        answers = [loaded.answer(row) for row in table.head(6).to_dict("records")]
        table = table.astype({"city": "category", "zip": "category"}).head(6)
        ((status, answer),) = loaded.ask({**PERSON, "city": "Rom"})
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", "city"])
    else:
        table = iris()[0].iloc[[0, 60, 120]]
        answers = loaded.answer(table.to_numpy().tolist())
    if name == "hinge.json":
        import xgboost

        expected = model.predict(xgboost.DMatrix(table)).tolist()
    else:
        expected = model.predict(table).tolist()
    assert [answer["prediction"] for answer in answers] == pytest.approx(expected)
    assert ("probabilities" in answers[0]) == (name in ("flowers.json", "categories.ubj"))
    if "probabilities" in answers[0]:
        probabilities = [list(answer["probabilities"].values()) for answer in answers]
        np.testing.assert_allclose(probabilities, model.predict_proba(table), rtol=1e-6)


@pytest.mark.parametrize("name", ["flowers.txt", "two.txt", "number.txt"])
def test_models_of_lightgbm_answer_as_the_library(
    saved: Path, trees: dict[str, Any], name: str
) -> None:
    loaded, model = Loaded(saved / name), trees[name]
    if name == "two.txt":
        table = people()
        answers = [loaded.answer(row) for row in table.head(6).to_dict("records")]
        table = table.astype({"city": "category", "zip": "category"}).head(6)
    else:
        table = iris()[0].iloc[[0, 60, 120]].to_numpy()
        answers = loaded.answer(table.tolist())
    assert [answer["prediction"] for answer in answers] == pytest.approx(model.predict(table))
    if name != "number.txt":
        probabilities = [list(answer["probabilities"].values()) for answer in answers]
        np.testing.assert_allclose(probabilities, model.predict_proba(table))


def test_tensors_of_the_open_inference_protocol_are_columns_or_rows(forest: Loaded) -> None:
    values = np.array(ROWS)
    matrix = {"name": "x", "shape": [2, 4], "datatype": "FP64", "data": values.ravel().tolist()}
    columns = [
        {"name": name, "shape": [2, 1], "datatype": "FP64", "data": values[:, index].tolist()}
        for index, name in enumerate("abcd")
    ]
    for tensors in ([matrix], columns):
        outputs = forest.answer({"id": "7", "inputs": tensors})["outputs"]
        assert [output["name"] for output in outputs] == ["prediction", "probabilities"]
        assert (outputs[0]["datatype"], outputs[0]["data"]) == ("BYTES", ["setosa", "virginica"])
        assert outputs[1]["shape"] == [2, 3]
    head = {"inputs": [{**matrix, "parameters": {"binary_data_size": values.nbytes}}]}
    del head["inputs"][0]["data"]
    text = json.dumps(head).encode()
    headers = [(b"inference-header-content-length", str(len(text)).encode())]
    ((status, _, body),) = answers_of(
        forest.model, bytearray(text + values.tobytes()), headers=headers
    )
    outputs = json.loads(body)["outputs"]
    assert (status, outputs[0]["data"]) == (200, ["setosa", "virginica"])


def test_the_signature_has_the_columns_and_an_example_that_works(
    saved: Path, boosters: dict[str, Any], trees: dict[str, Any]
) -> None:
    for name in ("mixed.skops", "nameless.skops", "categories.ubj", "number.ubj", "two.txt"):
        loaded = Loaded(saved / name)
        signature = read_signature(loaded.handler.signature)
        assert signature is not None
        assert "prediction" in loaded.answer(signature.example)
        is_classifier = "number" not in name and "nameless" not in name
        answer = signature.output["$defs"]["Answer"]
        assert ("probabilities" in answer["required"]) == is_classifier
        names = ["age", "city", "zip", "paid"] if is_classifier else list("0123")
        assert signature.input["required"] == names
    signature = read_signature(Loaded(saved / "mixed.skops").handler.signature)
    assert signature is not None
    assert signature.input["properties"]["city"]["enum"] == ["Bern", "Linz", "Ulm"]
    assert signature.content_types[1] == "text/csv"


class Payload:
    def __reduce__(self) -> Any:
        return exec, ("open('ran', 'w').close()",)


def test_a_pickle_runs_nothing_without_trust(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(LoadError, match=r"runs any code.*skops\.io\.dump\(model, 'evil\.skops'\)"):
        Loaded(tmp_path / "evil.pkl")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(LoadError, match="lacks `predict`"):
        Loaded(tmp_path / "evil.pkl", trust=True)
    assert (tmp_path / "ran").exists()
    assert Loaded(saved / "forest.joblib", trust=True).answer(ROWS[0])["prediction"] == "setosa"


class OwnEstimator:
    """An estimator that skops does not know."""

    n_features_in_ = 1

    def predict(self, rows: Any) -> Any:
        return rows[:, 0] * 2


def test_types_that_skops_does_not_know_need_trust(tmp_path: Path) -> None:
    import skops.io

    skops.io.dump(OwnEstimator(), tmp_path / "own.skops")
    with pytest.raises(LoadError, match=r"OwnEstimator\. If you trust.*trust_pickle = \[\"m\"\]"):
        Loaded(tmp_path / "own.skops")
    assert Loaded(tmp_path / "own.skops", trust=True).answer([[3]]) == [{"prediction": 6.0}]


def test_a_file_without_a_model_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no trees")
    for path, error in {
        saved / "scaler.skops": "StandardScaler that lacks `predict`",
        tmp_path / "notes.txt": "no model for tables",
        tmp_path / "gone.skops": "no model file",
    }.items():
        with pytest.raises(LoadError, match=error):
            Loaded(path)


def test_a_missing_library_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"needs skops: pip install 'tsx-serve\[tabular\]'"):
        Loaded(saved / "forest.skops")
