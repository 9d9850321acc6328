"""The wire formats of OpenAI, and of the rerankers of Cohere and Jina."""
