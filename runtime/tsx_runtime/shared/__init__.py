"""Helpers that all other packages may use: paths, output, log formats, redaction."""
