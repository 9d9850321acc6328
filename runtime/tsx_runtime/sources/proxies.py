"""Which proxy the environment names for a URL: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY, in capitals or not."""

from __future__ import annotations

from urllib import request

from tsx_runtime.sources.urls import ModelUrl


def proxy_for(url: ModelUrl) -> str | None:
    """Its URL, which may hold a password; None where the environment names none, or says to go without."""
    named = request.getproxies_environment()
    host = url.host if url.port is None else f"{url.host}:{url.port}"
    if request.proxy_bypass_environment(host, named):  # type: ignore[attr-defined]  # typeshed leaves it out; requests relies on it too
        return None
    proxy = named.get(url.scheme) or named.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None
