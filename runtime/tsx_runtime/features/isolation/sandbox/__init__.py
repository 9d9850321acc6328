"""The system calls that isolate a worker. The policy is in `config.py`."""
