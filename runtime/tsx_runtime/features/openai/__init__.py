"""OpenAI's API, and the rerank APIs of Cohere and Jina.

Clients find them at `/v1/...`, `/v2/rerank` and `/rerank`. The handler of a model answers the
requests (docs/guides/openai.md).
"""
