"""The settings of workflows: where they are, and which ones a server loads at its start."""

from __future__ import annotations

from pathlib import Path

from tsx_runtime.settings.fields import FeatureSettings


class WorkflowsSettings(FeatureSettings):
    workflow_store: Path | None = None
    """directory that workflows are registered from; the model store if not set"""
    load_workflows: list[str] = []
    """workflows to load after the models: [name=]file, or 'all' in the workflow store"""
