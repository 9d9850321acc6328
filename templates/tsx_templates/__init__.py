"""What `tsx deploy` and `tsx init` render."""
