"""`tsx batch --on sagemaker`."""
