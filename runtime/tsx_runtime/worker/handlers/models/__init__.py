"""Loading models: files, weights, precision, compilation, sharing."""
