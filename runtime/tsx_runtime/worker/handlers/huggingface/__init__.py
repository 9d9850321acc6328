"""Hugging Face models that answer in batches: the requests of all clients run together, each
answered as transformers' pipeline would.
"""
