"""The content of a file in a form. It is apart from `requests.py`, which mypyc compiles."""

from __future__ import annotations


class FileContent(bytearray):
    """The content of a file in a form.

    Attributes:
        file_name: Its name on the client.
    """

    file_name = ""
