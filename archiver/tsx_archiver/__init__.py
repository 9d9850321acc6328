"""The .mar archive: manifest, write, open, verify. Imports neither torch nor another room."""
