"""The worker pool: processes, their life cycle and their supervision."""
