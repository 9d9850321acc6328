"""The command `tsx batch --on sagemaker`."""
