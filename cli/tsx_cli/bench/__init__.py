"""`tsx bench` searches for a model's best configuration within latency bounds, by measurements."""

POSITION = 30
SUMMARY = "Find the best way to run a model within a latency bound, by measuring it."
