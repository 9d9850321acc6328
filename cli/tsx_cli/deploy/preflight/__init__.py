"""The checks before a deployment: limits, predictions, and the diagnosis of a failed start."""
