"""A version of a model, and the plan for loading it."""
