"""What `tsx init` renders."""
