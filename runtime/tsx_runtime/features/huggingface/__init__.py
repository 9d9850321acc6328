"""Models of Hugging Face: directories that `save_pretrained` wrote, and `hf:ORG/NAME` in the Hub.

They need no handler of the user: `huggingface` or `huggingface_generation` is chosen for them
(docs/guides/huggingface.md).
"""
