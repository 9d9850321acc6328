"""What each target is made of: from what is wanted to resources. Pure functions."""

TARGETS = ("container", "sagemaker", "lambda", "kubernetes")
