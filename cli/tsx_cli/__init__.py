"""The commands. Importing it has no effect and imports nothing."""
