"""Tasks, threads and waits for events."""
