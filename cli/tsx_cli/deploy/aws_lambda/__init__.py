"""Deployments to Lambda functions."""
