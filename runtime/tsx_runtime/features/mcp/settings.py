"""The setting of the tools for agents."""

from __future__ import annotations

from tsx_runtime.settings.fields import FeatureSettings


class McpSettings(FeatureSettings):
    mcp: bool = False
    """whether agents can call each model that has a signature as a tool, at /mcp; see mcp.md"""
