"""Who may call: tokens, origins, limits per client."""
