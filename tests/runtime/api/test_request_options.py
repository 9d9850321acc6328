"""The request headers that ask for stored responses."""

from __future__ import annotations

from tsx_runtime.api.request_options import is_stored
from tsx_runtime.http.fast_lane.heads import Heads


def test_only_heads_with_prefer_or_idempotency_key_go_to_the_asgi_lane() -> None:
    assert is_stored([(b"prefer", b"wait=1, Respond-Async")])
    assert is_stored([(b"idempotency-key", b"k")])
    assert not is_stored([(b"prefer", b"return=minimal"), (b"content-type", b"respond-async")])
    # The fast lane checks a head when it parses it, not when it finds it in its cache.
    assert Heads._read.__code__.co_names.count("is_stored") == 1
