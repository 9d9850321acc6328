"""The handlers of MLflow's models, which answer MLflow's scoring protocol."""
