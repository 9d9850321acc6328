"""`ts.torch_handler`."""
