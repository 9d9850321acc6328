"""Models of MLflow, which answer as MLflow's scoring server does.

The handlers `mlflow_pyfunc` and `mlflow_pytorch` serve them (docs/guides/mlflow.md).
"""
