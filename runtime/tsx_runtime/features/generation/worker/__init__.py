"""Text generation: one interface over the engines, and the text of their tokens."""
