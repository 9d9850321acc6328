"""The command `python -m tsx_client generate URL -o stubs.py`.

It does what `tsx client generate` does, and needs no tsx-serve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tsx_client.client import Client
from tsx_client.errors import ClientError
from tsx_client.stubs import generate


def main(argv: Sequence[str] | None = None) -> str | None:
    """Run the command, and return the text of an error or None."""
    parser = argparse.ArgumentParser(
        "python -m tsx_client",
        description="Write Python that names a server's models, for editors and mypy.",
    )
    parser.add_argument("command", choices=["generate"])
    parser.add_argument("url", help="address of predictions, such as http://127.0.0.1:8080")
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write; standard output if not given"
    )
    arguments = parser.parse_args(argv)
    try:
        with Client(arguments.url) as client:
            text = generate(client)
    except ClientError as error:
        return str(error)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main())
