"""What runs in a model's own process."""
