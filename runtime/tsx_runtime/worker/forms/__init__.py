"""Forms of a model: other ways to run it.

`tsx optimize` builds them from the model, archives keep them, and workers load them.
"""
