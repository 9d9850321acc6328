"""One version of a model, and the plan by which it is loaded."""
