"""Kubernetes deployments."""
