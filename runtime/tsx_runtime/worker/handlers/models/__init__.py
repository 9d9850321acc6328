"""The loading of models: files, weights, precision, compilation, shared memory."""
