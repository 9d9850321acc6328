"""The monitoring of a model in its archive: the configuration, and the baseline."""
