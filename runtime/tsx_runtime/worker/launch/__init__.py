"""How a worker process starts: fork server, ranks, programs."""
