"""The columns of estimators of scikit-learn, as far as these know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags

from tsx_runtime.features.tabular.worker.columns import Column, Columns
from tsx_runtime.worker.exceptions import LoadError

TEXT_COLUMN = "text"  # the column of models that take only texts
# Parameters of an estimator that passes its columns to others.
WRAPPED = {"estimator", "estimators", "regressor", "transformer_list"}


def columns_of(estimator: Any, file: str) -> tuple[Columns, Callable[[Any], Any]]:
    """Return the columns of an estimator, and a function that prepares a frame for it.

    Raises:
        LoadError: The estimator does not know how many columns it takes.
    """
    count = getattr(estimator, "n_features_in_", None)
    if count is not None:
        names = getattr(estimator, "feature_names_in_", None)
        labels = list(map(str, range(count) if names is None else names))
        known = {column.name: column for column in _known_columns(estimator, labels)}
        columns = [known.get(label, Column(label)) for label in labels]
        return Columns(columns, are_named=names is not None), lambda frame: frame
    first = _first_step(estimator)
    if isinstance(first, BaseEstimator) and get_tags(first).input_tags.string:
        column = Column(TEXT_COLUMN, "text", nullable=False)
        return Columns([column]), lambda frame: frame[TEXT_COLUMN].to_numpy(object)
    raise LoadError(
        f"{file} does not tell how many columns its {type(estimator).__name__} takes"
        " (`n_features_in_` is missing). Fit it with the columns, and save it again."
    )


def _first_step(estimator: Any) -> Any:
    """Return the first step of a pipeline that does something; other estimators themselves."""
    if not hasattr(estimator, "steps"):
        return estimator
    steps = (step for _, step in estimator.steps if step not in (None, "passthrough"))
    return _first_step(next(steps, None))


def _known_columns(estimator: Any, names: Sequence[str]) -> list[Column]:
    """Return the columns whose values are known from a fitted estimator and those within it."""
    estimator = _first_step(estimator)
    if not isinstance(estimator, BaseEstimator):
        return []
    if hasattr(estimator, "transformers_"):  # It is a ColumnTransformer.
        return [
            column
            for _, part, _ in estimator.transformers_
            if hasattr(part, "feature_names_in_")
            for column in _known_columns(part, part.feature_names_in_)
        ]
    if WRAPPED & estimator.get_params(deep=False).keys():
        return _known_columns(getattr(estimator, "best_estimator_", None), names)
    tags = get_tags(estimator)
    if tags.no_validation:
        return []
    categories = getattr(estimator, "categories_", None)
    if categories is not None:
        # An encoder with another setting, or without it, takes values that it does not know.
        only_known = getattr(estimator, "handle_unknown", None) == "error"
        return [
            _encoded(name, values.tolist(), only_known=only_known)
            for name, values in zip(names, categories, strict=True)
        ]
    # SimpleImputer has the values that replace missing ones, and HistGradientBoosting a mask.
    mask = getattr(estimator, "is_categorical_", None)
    if mask is None:
        replacements = np.asarray(getattr(estimator, "statistics_", 0.0))
        mask = [replacements.dtype.kind == "O"] * len(names)
    return [
        Column(name, "any" if takes_any else "number", tags.input_tags.allow_nan)
        for name, takes_any in zip(names, mask, strict=True)
    ]


def _encoded(name: str, categories: list[Any], *, only_known: bool) -> Column:
    values = tuple(value for value in categories if value is not None and value == value)
    is_text = all(isinstance(value, str) for value in values)
    nullable = not only_known or len(values) < len(categories)
    return Column(name, "text" if is_text else "any", nullable, values if only_known else ())
