"""Sequences of requests to a stateful model: one worker answers them, one by one."""
