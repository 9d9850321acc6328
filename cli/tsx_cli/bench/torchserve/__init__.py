"""TorchServe's auto-benchmark: its configuration files, run on tsx or a running TorchServe, and its
reports.
"""
