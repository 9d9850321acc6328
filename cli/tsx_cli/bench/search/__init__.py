"""The search for the best configuration: test servers, their figures, and the next measurement."""
