"""The registered models: registration, replacement, lookup, removal."""
