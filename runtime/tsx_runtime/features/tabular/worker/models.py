"""Loading of models from files of skops, joblib, XGBoost and LightGBM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tsx_archiver import describe_model_file
from tsx_archiver.metadata.tabular import EXTRA, PACKAGES
from tsx_runtime.features.tabular.worker.columns import ANY, NUMBER, known_types, nullable, one_of
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
# The objectives of XGBoost and LightGBM whose results are the probabilities of classes.
CLASSIFIERS = ("binary:logistic", "multi:softprob", "binary", "multiclass", "multiclassova")


class TableModel(NamedTuple):
    """A loaded model.

    Attributes:
        columns: The types of its columns, by name.
        predict: Returns the predictions for a data frame, and the probabilities of the classes or
            None, as arrays with a row each.
        classes: The names of a classifier's classes.
    """

    columns: Mapping[str, Any]
    predict: Callable[[Any], tuple[Any, Any]]
    classes: Sequence[str]


def load_model(path: Path, model: str, *, is_trusted: bool) -> TableModel:
    """Load a model by the kind of its file.

    Args:
        path: The file.
        model: The name of the model, for messages.
        is_trusted: Whether code in the file may run.

    Raises:
        LoadError: The file is of another kind, needs trust or a package, or has no model that
            predicts.
    """
    kind = describe_model_file(path, called=Path(path.name)).kind
    if kind not in PACKAGES:
        raise LoadError(
            f"{path.name} is no model for tables: the handler tabular takes files of skops"
            " (.skops), joblib (.joblib, .pkl), XGBoost (.json, .ubj) and LightGBM (.txt)."
        )
    if find_spec(PACKAGES[kind]) is None:
        raise LoadError(
            f"{path.name} needs {PACKAGES[kind]}: pip install 'tsx-serve[{EXTRA}]' installs it."
        )
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
    if not is_trusted:
        raise LoadError(
            f"{path.name} is a pickle, and loading a pickle runs any code that is in it. Save"
            f" the model by skops instead, whose files hold no code: skops.io.dump(model,"
            f" '{path.stem}.skops'). {advice}"
        )
    import joblib  # an extra

    return _of_estimator(joblib.load(path), path.name)


def _of_estimator(estimator: Any, file: str) -> TableModel:
    count = getattr(estimator, "n_features_in_", None)
    if count is None or not hasattr(estimator, "predict"):
        raise LoadError(
            f"{file} has a {type(estimator).__name__} that lacks `predict` or `n_features_in_`."
            " Save a fitted estimator for tables, or a pipeline that ends with one."
        )
    names = getattr(estimator, "feature_names_in_", None)
    # The classes of several outputs are a list, and have no probabilities.
    labels: Any = getattr(estimator, "classes_", None)
    is_classifier = isinstance(labels, np.ndarray) and hasattr(estimator, "predict_proba")

    def predict(frame: Any) -> tuple[Any, Any]:
        rows = frame.to_numpy() if names is None else frame
        probabilities = estimator.predict_proba(rows) if is_classifier else None
        return np.asarray(estimator.predict(rows)), probabilities

    columns = dict.fromkeys(map(str, range(count) if names is None else names), ANY)
    columns |= known_types(estimator, list(columns))
    return TableModel(columns, predict, list(map(str, labels.tolist())) if is_classifier else [])


def _load_xgboost(path: Path) -> TableModel:
    import xgboost  # an extra

    booster = xgboost.Booster(model_file=str(path))
    learner = json.loads(booster.save_config())["learner"]
    parameters = learner["learner_model_param"]
    # The probabilities of several labels are not those of classes, so they are the prediction.
    has_labels = int(parameters["num_target"]) > 1
    categories = {}
    if "c" in (booster.feature_types or ()):
        stored = booster.get_categories(export_to_arrow=True).to_arrow()
        categories = {name: values.to_pylist() for name, values in stored if values is not None}
    names = booster.feature_names or map(str, range(booster.num_features()))
    # After an early stop, as in XGBoost's own classes.
    trees = (0, int(booster.attr("best_iteration") or -1) + 1)

    def predict(rows: Any) -> Any:
        matrix = xgboost.DMatrix(rows, enable_categorical=True)
        return booster.predict(matrix, iteration_range=trees, validate_features=False)

    objective = "" if has_labels else learner["objective"]["name"]
    return _of_booster(predict, names, categories, objective, int(parameters["num_class"]))


def _load_lightgbm(path: Path) -> TableModel:
    import lightgbm  # an extra

    booster = lightgbm.Booster(model_file=str(path))
    names, parameters = booster.feature_name(), booster.params
    # Without columns of categories, the list is None or empty.
    stored = booster.pandas_categorical or ()
    indices = parameters["categorical_feature"] if stored else ()
    categories = {names[index]: values for index, values in zip(indices, stored, strict=True)}
    objective, count = parameters.get("objective"), booster.num_model_per_iteration()
    return _of_booster(booster.predict, names, categories, objective, count)


def _of_booster(
    predict_rows: Callable[[Any], Any],
    names: Iterable[str],
    categories: Mapping[str, Sequence[Any]],
    objective: str,
    class_count: int,
) -> TableModel:
    """Return a model of XGBoost or LightGBM, which know classes only by number."""
    is_classifier = objective in CLASSIFIERS
    # Models with two classes have one output, and a count of 0 or 1.
    classes = list(map(str, range(max(class_count, 2)))) if is_classifier else []
    dtypes = {name: pd.CategoricalDtype(values) for name, values in categories.items()}

    def predict(frame: Any) -> tuple[Any, Any]:
        # A column whose categories are not in the file takes their codes, as numbers.
        values = predict_rows(frame.astype(dtypes) if dtypes else frame.to_numpy())
        if not is_classifier:
            return values, None
        if values.ndim == 1:
            values = np.column_stack([1 - values, values])
        return values.argmax(axis=1), values

    columns = dict.fromkeys(names, nullable(NUMBER))
    columns |= {name: nullable(one_of(values)) for name, values in categories.items()}
    return TableModel(columns, predict, classes)
