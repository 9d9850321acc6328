"""Isolates a worker: system calls only. The policy is in `core/isolation/config.py`."""
