"""The server process of `tsx serve` and of the targets: its start, sockets, logs and stop."""
