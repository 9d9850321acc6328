"""Text generation: one interface over the engines that run it, and what becomes of their tokens."""
