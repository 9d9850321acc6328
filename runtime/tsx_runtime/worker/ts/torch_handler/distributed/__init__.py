"""`ts.torch_handler.distributed`."""
