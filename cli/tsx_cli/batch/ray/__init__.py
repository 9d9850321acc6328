"""`tsx batch --on` a Ray cluster."""
