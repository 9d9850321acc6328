"""The system calls that isolate a worker. The policy is in `core/isolation/config.py`."""
