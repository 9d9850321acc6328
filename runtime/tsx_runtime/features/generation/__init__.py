"""The generation of text by language models, whose engines batch sequences token by token.

The handler `huggingface_generation` uses it (docs/guides/generation.md).
"""
