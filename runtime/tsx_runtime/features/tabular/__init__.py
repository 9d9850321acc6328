"""Models of scikit-learn, XGBoost and LightGBM as files, with columns as inputs by name.

Models with the handler `tabular` use it (docs/guides/tabular.md). The setting `trust_pickle` allows
pickles.
"""
