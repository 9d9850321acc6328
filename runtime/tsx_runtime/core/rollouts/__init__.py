"""Canary rollouts: steps, decisions, and their log."""
