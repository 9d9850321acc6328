"""What keeps an isolated worker to itself: the system calls, without any decision. `core/isolation/config.py` decides."""
