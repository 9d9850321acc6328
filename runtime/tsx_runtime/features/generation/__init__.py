"""Text generation with language models, in engines that batch sequences token by token.

Models with the handler `huggingface_generation` use it (docs/guides/generation.md).
"""
