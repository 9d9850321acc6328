"""TorchServe 0.12 and tsx side by side: the same store, the same requests, and each difference that is meant has a name."""
