"""Isolation of a model's workers: sandbox configuration, cgroups, hidden credentials."""
