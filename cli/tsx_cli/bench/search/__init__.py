"""The search for the best configuration: servers, their figures under load, and what is measured next."""
