"""The setting that trusts the code of Hugging Face models."""

from __future__ import annotations

from tsx_runtime.settings.fields import FeatureSettings


class HuggingFaceSettings(FeatureSettings):
    trust_remote_code: list[str] = []
    """names of models whose Hugging Face directory may bring its own code (trust_remote_code); none
    if empty"""
