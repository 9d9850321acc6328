"""Hugging Face models whose requests run in batches.

The responses equal those of transformers' pipelines.
"""
