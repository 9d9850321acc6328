"""What `tsx init` and `tsx deploy` render."""
