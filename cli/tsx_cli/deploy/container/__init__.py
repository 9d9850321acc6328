"""Containers on one machine."""
