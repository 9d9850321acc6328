"""The checks before a deployment: limits, credentials."""
