"""`tsx bench`: the measured search for a model's best configuration within a latency bound."""
