"""Self-signed certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    certificate: Path
    key: Path


def make_certificate(
    directory: Path,
    name: str = "tls",
    hosts: str = "DNS:localhost,IP:127.0.0.1",
    password: str = "",
    *,
    rsa: int = 0,
) -> Pair:
    """Make a self-signed certificate and its key, both PEM."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    kind = [f"rsa:{rsa}"] if rsa else ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = ["openssl", "req", "-x509", "-newkey", *kind, "-days", "2", "-subj", f"/CN={name}"]
    command += [
        "-addext",
        f"subjectAltName={hosts}",
        "-out",
        str(pair.certificate),
        "-keyout",
        str(pair.key),
    ]
    command += ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    pair.key.chmod(0o600)
    return pair
