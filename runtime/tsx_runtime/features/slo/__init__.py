"""Latency targets: batch times, batches that keep the target, and refusals on arrival."""
