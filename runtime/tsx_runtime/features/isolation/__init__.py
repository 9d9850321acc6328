"""Isolation of workers from files, the network and other processes.

The setting `isolation`, of the server or of one model, turns it on (docs/guides/security.md).
"""
