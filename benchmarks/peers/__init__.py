"""tsx beside TorchServe, Mosec and LitServe: the same models, in turns, and one table."""
