"""Deployments to Kubernetes."""
