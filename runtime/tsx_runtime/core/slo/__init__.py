"""Latency targets: how long batches take, which batch keeps the target, and what is refused on
arrival.
"""
