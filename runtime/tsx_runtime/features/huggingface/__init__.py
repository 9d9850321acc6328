"""Models of Hugging Face: directories that `save_pretrained` wrote, and `hf:ORG/NAME` of the Hub.

The handlers `huggingface` and `huggingface_generation` serve them (docs/guides/huggingface.md).
"""
