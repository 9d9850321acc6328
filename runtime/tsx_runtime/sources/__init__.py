"""The sources of models: URLs (http, https, s3, file) and the model store.

An allow list decides which URLs a client may load.
"""

from tsx_runtime.sources.fetch import Fetcher, Trust
from tsx_runtime.sources.urls import (
    AllowList,
    ModelUrl,
    in_store,
    is_hub,
    is_url,
    parse_url,
    store_hint,
)

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
