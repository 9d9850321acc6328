"""Hugging Face models whose requests run in batches.

Each response is that of transformers' pipeline.
"""
