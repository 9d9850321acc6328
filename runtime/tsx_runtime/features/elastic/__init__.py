"""Numbers of workers that follow the load, and memory budgets that unload idle models.

The load decides how many workers a model has if its maximum is above its minimum. `model_memory`
and `model_gpu_memory` limit the memory of the workers of all models (docs/guides/elastic.md).
"""
