"""The permission to call: tokens, origins, limits per client."""
