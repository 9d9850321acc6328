"""Where archives come from that are not on this machine yet: http, https and s3, by an allow list, into the model store."""

from tsx_runtime.sources.fetch import Fetcher, Trust
from tsx_runtime.sources.urls import AllowList, ModelUrl, in_store, is_url, parse_url

__all__ = ["AllowList", "Fetcher", "ModelUrl", "Trust", "in_store", "is_url", "parse_url"]
