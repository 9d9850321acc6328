"""`tsx bench`: finds the best way to run a model inside a latency bound, proves it by measuring, and keeps it."""
