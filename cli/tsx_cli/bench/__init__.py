"""`tsx bench` searches for a model's best configuration within latency bounds, by measurements."""
