"""Workers that follow the load, and memory budgets that unload idle models.

A model whose largest number of workers is above its smallest gets workers under load; `model_memory`
and `model_gpu_memory` limit the memory of all workers (docs/guides/elastic.md).
"""
