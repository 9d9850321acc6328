"""Deployments to containers on one machine."""
