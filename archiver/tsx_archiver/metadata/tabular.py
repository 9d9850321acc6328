"""Model files of scikit-learn, XGBoost and LightGBM, detected by their first bytes."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

TabularKind: TypeAlias = Literal["skops", "pickle", "xgboost", "lightgbm"]

HANDLER = "tabular"
EXTRA = "tabular"  # the extra of tsx-serve with the packages
# The package that loads each kind.
PACKAGES: dict[str, str] = {
    "skops": "skops",
    "pickle": "joblib",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
}
_XGBOOST_START = re.compile(rb'\{\s*"learner"|\{\w\0*\x07learner\{')
# The member of a zip file that skops writes.
SKOPS_SCHEMA = "schema.json"
# Compression hides the first bytes of a pickle.
PICKLE_SUFFIXES = (".joblib", ".pkl", ".pickle")


def detect_table_model(head: bytes, suffix: str) -> TabularKind | None:
    """Return the kind of a model by its first bytes, or that of a pickle by its suffix.

    XGBoost writes JSON or UBJSON that begin with the key `learner`, and LightGBM a text.
    """
    if head.startswith((b"tree\n", b"tree\r\n")):
        return "lightgbm"
    if _XGBOOST_START.match(head):
        return "xgboost"
    return "pickle" if suffix.lower() in PICKLE_SUFFIXES else None
