"""The setting of recordings."""

from __future__ import annotations

from tsx_runtime.settings.fields import FeatureSettings


class RecordingSettings(FeatureSettings):
    record_headers: list[str] | None = None
    """headers that recordings store in addition to those a replay needs; if not set, all that do
    not identify the client"""
