"""Models from one Python file, whose type annotations define the requests and responses.

Models with the handler `python_file` use it (docs/guides/python-files.md).
"""
