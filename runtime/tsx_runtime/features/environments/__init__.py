"""Virtual environments for models that need packages of their own.

`install_py_dep_per_model` installs the requirements file of an archive, and `useVenv` in
model-config.yaml gives the workers the interpreter of a venv (docs/guides/placement.md).
"""
