"""The system calls that isolate a worker. The policy is in `features/isolation/config.py`."""
