"""The command `tsx batch --on` a Ray cluster."""
