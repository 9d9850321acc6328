"""Runs batches through a handler."""
