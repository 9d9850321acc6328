"""The memory budgets of all workers."""

from __future__ import annotations

from tsx_runtime.settings.fields import FeatureSettings, Size


class ElasticSettings(FeatureSettings):
    model_memory: Size | None = None
    """memory that the workers of all models may use, such as 8GB; no limit if not set; see
    elastic.md"""
    model_gpu_memory: Size | None = None
    """memory of each GPU that the workers of all models may use, such as 20GB; no limit if not set;
    see elastic.md"""
