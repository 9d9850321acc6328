"""Times, counts and traces of requests and batches."""
