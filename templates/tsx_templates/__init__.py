"""Templates that `tsx init` and `tsx deploy` render."""
