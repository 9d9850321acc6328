"""Downloads archives from http, https and s3 into the model store, and models of the Hugging Face
Hub, within an allow list.
"""

from tsx_runtime.sources.fetch import Fetcher, Trust
from tsx_runtime.sources.hub import is_hub
from tsx_runtime.sources.urls import AllowList, ModelUrl, in_store, is_url, parse_url, store_hint

__all__ = [
    "AllowList",
    "Fetcher",
    "ModelUrl",
    "Trust",
    "in_store",
    "is_hub",
    "is_url",
    "parse_url",
    "store_hint",
]
