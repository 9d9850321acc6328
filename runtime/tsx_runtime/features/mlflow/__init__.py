"""Models of MLflow, with the requests and answers of MLflow's scoring server.

Models with the handlers `mlflow_pyfunc` and `mlflow_pytorch` use it (docs/guides/mlflow.md).
"""
