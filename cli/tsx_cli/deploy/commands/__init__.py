"""The commands of `tsx deploy`."""
