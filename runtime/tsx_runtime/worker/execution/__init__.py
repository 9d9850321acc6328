"""The execution of batches by a handler."""
