"""The server process of `tsx serve` and of the other targets: its start, sockets and stop."""
