"""The search for the best configuration: servers, their figures, and the next measurement."""
