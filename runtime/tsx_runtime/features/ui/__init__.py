"""The web page at `/ui/` of the management address, and the page of the API at `/docs`.

They are always on (docs/guides/ui.md).
"""
