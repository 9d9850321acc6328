"""Tasks, threads and waiting on file descriptors."""
