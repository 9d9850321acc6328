"""TLS contexts of keys and certificates in memory, which OpenSSL reads from files alone."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tsx_archiver.storage.private_directory import private_opener, temporary_place
from tsx_runtime.targets.server.keystore import Pem


def server_context() -> ssl.SSLContext:
    """TLS 1.2 and later; without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION  # `tls_transport.py` relies on it
    return context


def load_pem(context: ssl.SSLContext, pem: Pem) -> None:
    """Raises ssl.SSLError."""
    with _as_file(pem.certificates) as certificates, _as_file(pem.key) as key:
        context.load_cert_chain(certificates, key)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """On Linux in memory, so that no key lies on a disk."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("tsx-tls"), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
        return
    with tempfile.TemporaryDirectory(
        dir=temporary_place()
    ) as directory:  # no other user may read it
        path = Path(directory, "pair.pem")
        with open(path, "xb", opener=private_opener) as file:
            file.write(content)
        yield str(path)
