"""Rollouts, which move requests to a new version in steps as long as it works well.

`POST /models/NAME/rollout` or `tsx models rollout` starts one (docs/guides/routing.md).
"""
