"""The handler of Python files."""
