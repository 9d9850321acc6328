"""Metrics for Prometheus and for TorchServe's log files."""
