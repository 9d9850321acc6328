"""The engines of text generation, and what they compute each step with."""
