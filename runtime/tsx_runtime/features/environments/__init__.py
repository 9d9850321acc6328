"""Virtual environments of models with their own packages.

`install_py_dep_per_model`, or `useVenv` in model-config.yaml, turns them on
(docs/guides/placement.md).
"""
