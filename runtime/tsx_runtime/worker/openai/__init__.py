"""OpenAI's wire formats, and those of Cohere's and Jina's rerankers: the body of a request to what
a model is asked, and back.
"""
