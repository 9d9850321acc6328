"""The worker: the process that runs a model."""
