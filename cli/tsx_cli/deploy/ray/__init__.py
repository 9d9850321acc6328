"""Deployments to a Ray cluster."""
