"""The types of a model's columns, as far as estimators of scikit-learn know them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags

NUMBER: Any = Annotated[float, Field(allow_inf_nan=False)]
# Parameters of an estimator that passes its columns to others.
WRAPPED = {"estimator", "estimators", "regressor", "transformer_list"}


def nullable(kind: Any) -> Any:
    """Return the type of a column whose values may be missing, as null is NaN for the model."""
    return Annotated[kind | None, AfterValidator(lambda x: math.nan if x is None else x)]


ANY = nullable(NUMBER | str)


def one_of(values: Sequence[Any]) -> Any:
    """Return the type of a column that has only these values."""
    return Literal.__getitem__(tuple(values))


def known_types(estimator: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the types of columns that are known from a fitted estimator and those within it."""
    if hasattr(estimator, "steps"):
        return known_types(estimator.steps[0][1], names)
    if hasattr(estimator, "transformers_"):  # It is a ColumnTransformer.
        return {
            name: kind
            for _, part, _ in estimator.transformers_
            if hasattr(part, "feature_names_in_")
            for name, kind in known_types(part, part.feature_names_in_).items()
        }
    if hasattr(estimator, "best_estimator_"):
        return known_types(estimator.best_estimator_, names)
    if not isinstance(estimator, BaseEstimator) or WRAPPED & estimator.get_params(False).keys():
        return {}
    tags = get_tags(estimator)
    if tags.no_validation:
        return {}
    if hasattr(estimator, "categories_"):
        # An encoder with another setting, or without it, takes values that it does not know.
        only_known = getattr(estimator, "handle_unknown", None) == "error"
        kinds = [_encoded(values.tolist(), only_known) for values in estimator.categories_]
        return dict(zip(names, kinds, strict=True))
    number = nullable(NUMBER) if tags.input_tags.allow_nan else NUMBER
    # HistGradientBoosting has a mask of categories, and SimpleImputer what replaces missing values.
    takes_any = getattr(estimator, "is_categorical_", None)
    if takes_any is None:
        takes_any = np.asarray(getattr(estimator, "statistics_", 0.0)).dtype.kind == "O"
    marks = np.broadcast_to(takes_any, len(names))
    return {name: number for name, is_any in zip(names, marks, strict=True) if not is_any}


def _encoded(categories: list[Any], only_known: bool) -> Any:
    values = [value for value in categories if value is not None and value == value]
    if only_known:
        return one_of(values) if len(values) == len(categories) else nullable(one_of(values))
    return nullable(str) if all(isinstance(value, str) for value in values) else ANY
