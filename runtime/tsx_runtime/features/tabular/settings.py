"""The setting that allows models in pickles."""

from __future__ import annotations

from tsx_runtime.settings.fields import FeatureSettings


class TabularSettings(FeatureSettings):
    trust_pickle: list[str] = []
    """names of models whose .joblib, .pkl or .skops file may run code while it is loaded
    (tabular models); none if empty"""
