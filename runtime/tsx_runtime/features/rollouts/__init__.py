"""Rollouts: a new version gets more and more requests, as long as it does well."""
