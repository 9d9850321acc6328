"""OpenAI's API, and the rerank APIs of Cohere and Jina, for models that write or read texts.

Clients find it at `/v1/...`; a handler answers its requests (docs/guides/openai.md).
"""
