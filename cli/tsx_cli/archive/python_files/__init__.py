"""Archives for Python files, whose code is read and does not run."""
