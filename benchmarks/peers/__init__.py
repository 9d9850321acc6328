"""A comparison of tsx with TorchServe, Mosec and LitServe on the same models."""
