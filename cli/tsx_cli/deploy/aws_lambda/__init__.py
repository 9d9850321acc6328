"""Lambda functions."""
