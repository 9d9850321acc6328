"""Helpers that every floor above may use: paths, output, log formats, redaction."""
