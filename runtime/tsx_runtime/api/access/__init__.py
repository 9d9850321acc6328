"""The checks whether a client may call: tokens, origins, limits per client."""
