"""Loading of models from files of skops, joblib, XGBoost and LightGBM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tsx_archiver import describe_model_file
from tsx_runtime.features.tabular.worker.columns import Column, Columns
from tsx_runtime.features.tabular.worker.estimators import columns_of
from tsx_runtime.worker.exceptions import LoadError

# Types of scikit-learn's own models that hold only data. skops leaves them to its users, as wrong
# numbers in some could crash the process that predicts; here this is a worker, which is replaced.
DATA_TYPES = {
    "numpy.dtype",
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.metrics._dist_metrics.EuclideanDistance64",
    "sklearn.metrics._scorer._PassthroughScorer",
    "sklearn.model_selection._split.KFold",
    "sklearn.model_selection._split.StratifiedKFold",
    "sklearn.neighbors._kd_tree.KDTree",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.tree._tree.Tree",
    "sklearn.utils._bunch.Bunch",
}
XGBOOST_CLASSIFIERS = ("binary:logistic", "multi:softprob", "multi:softmax")
LIGHTGBM_CLASSIFIERS = ("binary", "multiclass", "multiclassova")


class TablePrediction(NamedTuple):
    """The predictions for rows.

    Attributes:
        values: An array with a row each.
        probabilities: For each output of a classifier, its classes and an array of rows.
    """

    values: Any
    probabilities: Sequence[tuple[list[Any], Any]] = ()

    def part(self, start: int, stop: int) -> TablePrediction:
        """Return the predictions for the rows from `start` to `stop`."""
        outputs = [(classes, rows[start:stop]) for classes, rows in self.probabilities]
        return TablePrediction(self.values[start:stop], outputs)

    def records(self, names: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return an object for each row, with the names of classes in place of their numbers."""
        outputs = [
            [
                dict(
                    zip((names.get(str(label), str(label)) for label in classes), row, strict=True)
                )
                for row in rows.tolist()
            ]
            for classes, rows in self.probabilities
        ]
        records: list[dict[str, Any]] = []
        for index, value in enumerate(self.values.tolist()):
            label = names.get(str(value), value) if outputs else value
            records.append({"prediction": label})
            if outputs:
                by_output = [rows[index] for rows in outputs]
                records[-1]["probabilities"] = by_output if len(by_output) > 1 else by_output[0]
        return records

    def tensors(self) -> dict[str, Any]:
        """Return arrays with the names of outputs; texts are arrays of texts."""
        values = self.values.astype(str) if self.values.dtype == object else self.values
        if len(self.probabilities) != 1:  # Several outputs may differ in their classes.
            return {"prediction": values}
        return {"prediction": values, "probabilities": self.probabilities[0][1]}


NO_PREDICTION = TablePrediction(np.empty(0))


class TableModel(NamedTuple):
    """A loaded model: its columns, and a function that predicts for the rows of a frame."""

    columns: Columns
    predict: Callable[[Any], TablePrediction]
    is_classifier: bool


def load_model(path: Path, model: str, *, is_trusted: bool) -> TableModel:
    """Load a model by the kind of its file.

    Args:
        path: The file.
        model: The name of the model, for messages.
        is_trusted: Whether code in the file may run.

    Raises:
        LoadError: The file is of another kind, needs trust, or has no model that predicts.
    """
    kind = describe_model_file(path, called=Path(path.name)).kind
    if kind == "xgboost":
        return _load_xgboost(path)
    if kind == "lightgbm":
        return _load_lightgbm(path)
    advice = (
        f"If you trust its author, load it with `tsx serve --trust-pickle`, or with the setting"
        f' trust_pickle = ["{model}"].'
    )
    if kind == "skops":
        import skops.io  # an extra

        types = skops.io.get_untrusted_types(file=path)
        if (unknown := sorted(set(types) - DATA_TYPES)) and not is_trusted:
            raise LoadError(
                f"{path.name} has types that skops does not know to be safe, and which could run"
                f" any code while they are loaded: {', '.join(unknown)}. {advice}"
            )
        return _of_estimator(skops.io.load(path, trusted=types), path.name)
    if kind == "pickle":
        if not is_trusted:
            raise LoadError(
                f"{path.name} is a pickle, and loading a pickle runs any code that is in it. Save"
                f" the model by skops instead, whose files hold no code: skops.io.dump(model,"
                f" '{path.stem}.skops'). {advice}"
            )
        import joblib  # an extra

        return _of_estimator(joblib.load(path), path.name)
    raise LoadError(
        f"{path.name} is no model for tables: the handler tabular takes files of skops (.skops),"
        " joblib (.joblib, .pkl), XGBoost (.json, .ubj) and LightGBM (.txt)."
    )


def _of_estimator(estimator: Any, file: str) -> TableModel:
    if not callable(getattr(estimator, "predict", None)):
        raise LoadError(
            f"{file} has a {type(estimator).__name__}, which has no method `predict`. Save an"
            " estimator that is fitted, or a pipeline that ends with one."
        )
    columns, prepare = columns_of(estimator, file)
    is_classifier = callable(getattr(estimator, "predict_proba", None))

    def predict(frame: Any) -> TablePrediction:
        rows = prepare(frame)
        values = np.asarray(estimator.predict(rows))
        if not is_classifier:
            return TablePrediction(values)
        # With several outputs, both are lists with an entry for each.
        outputs, classes = estimator.predict_proba(rows), estimator.classes_
        if not isinstance(outputs, list):
            outputs, classes = [outputs], [classes]
        names = [list(np.asarray(labels).tolist()) for labels in classes]
        return TablePrediction(values, list(zip(names, outputs, strict=True)))

    return TableModel(columns, predict, is_classifier)


def _load_xgboost(path: Path) -> TableModel:
    import xgboost  # an extra

    booster = xgboost.Booster(model_file=str(path))
    # With this attribute, only the class that saved the model may load it.
    booster.set_attr(scikit_learn=None)
    learner = json.loads(booster.save_config())["learner"]
    # The probabilities of several labels are not those of classes, so they are the prediction.
    is_classifier = (
        learner["objective"]["name"] in XGBOOST_CLASSIFIERS
        and int(learner["learner_model_param"]["num_target"]) == 1
    )
    model = (xgboost.XGBClassifier if is_classifier else xgboost.XGBRegressor)()
    model.load_model(booster.save_raw())
    names = booster.feature_names
    categories = {}
    if "c" in (booster.feature_types or ()):
        stored = booster.get_categories(export_to_arrow=True).to_arrow()
        categories = {name: values.to_pylist() for name, values in stored if values is not None}
    columns = [
        _column(name, categories.get(name), only_known=True)
        for name in names or map(str, range(booster.num_features()))
    ]

    def predict(frame: Any) -> TablePrediction:
        # A column whose categories are not in the file takes their codes, as numbers.
        rows = frame if categories else np.asarray(frame)
        if is_classifier:
            return _of_probabilities(model.predict_proba(rows, validate_features=False))
        return TablePrediction(model.predict(rows, validate_features=False))

    return TableModel(Columns(columns, are_named=names is not None), predict, is_classifier)


def _load_lightgbm(path: Path) -> TableModel:
    import lightgbm  # an extra

    booster = lightgbm.Booster(model_file=str(path))
    parameters = booster.params
    is_classifier = parameters.get("objective") in LIGHTGBM_CLASSIFIERS
    names = booster.feature_name()
    categorical = parameters.get("categorical_feature") or []
    categories = (
        dict(zip(categorical, booster.pandas_categorical, strict=True))
        if booster.pandas_categorical
        else {}
    )
    columns = [_column(name, categories.get(index)) for index, name in enumerate(names)]

    def predict(frame: Any) -> TablePrediction:
        values = booster.predict(frame if categories else np.asarray(frame))
        if not is_classifier:
            return TablePrediction(values)
        return _of_probabilities(
            np.column_stack([1 - values, values]) if values.ndim == 1 else values
        )

    return TableModel(Columns(columns), predict, is_classifier)


def _column(name: str, categories: list[Any] | None, *, only_known: bool = False) -> Column:
    """Return a column; with `only_known`, the model fails for a category that it does not know."""
    if categories is None:
        return Column(name, "number")
    is_text = all(isinstance(category, str) for category in categories)
    choices = tuple(categories) if only_known else ()
    return Column(name, "text" if is_text else "any", True, choices, categories)


def _of_probabilities(probabilities: Any) -> TablePrediction:
    """Return the most likely classes, which these libraries know only by number."""
    classes = list(range(probabilities.shape[1]))
    return TablePrediction(probabilities.argmax(axis=1), [(classes, probabilities)])
