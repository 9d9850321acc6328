"""The checks before a deployment: limits, prices, credentials."""
