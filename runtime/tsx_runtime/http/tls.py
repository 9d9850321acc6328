"""The TLS certificate of the server, which is read once at the start."""

from __future__ import annotations

import logging
import os
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tsx_archiver.storage.private_directory import private_opener, temporary_directory
from tsx_runtime.errors import SettingError
from tsx_runtime.http.keystore import Pem, read_keystore
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import ROLES, Settings

CREATE_HINT = (
    "To create a pair for testing: openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout"
    " key.pem -out cert.pem -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
)

logger = logging.getLogger("tsx.server")


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return a context for the https addresses, or None if there are none.

    Raises:
        SettingError: The certificate or the key cannot be used.
    """
    names = [
        name
        for name in (f"{role}_address" for role in ROLES)
        if parse_address(getattr(settings, name)).scheme == "https"
    ]
    if not names:
        files = [
            name
            for name in ("certificate_file", "private_key_file", "keystore")
            if getattr(settings, name)
        ]
        if files and not getattr(settings, "enable_grpc_ssl", False):
            logger.warning(
                "no address begins with https://, so nothing is encrypted, although %s",
                f"{' and '.join(files)} were given",
            )
        return None
    if _from_keystore(settings):
        assert settings.keystore is not None
        return _load_pem(
            read_keystore(settings.keystore, settings.keystore_pass), settings.keystore
        )
    return _load_files(*_check_pair(settings, names[0]))


def read_pem(settings: Settings, setting: str) -> tuple[bytes, bytes]:
    """Return key and certificates as PEM for gRPC, which creates its own context.

    `setting` is the name of the setting that requires them, for errors.

    Raises:
        SettingError: The certificate or the key cannot be used.
    """
    if _from_keystore(settings):
        assert settings.keystore is not None
        pem = read_keystore(settings.keystore, settings.keystore_pass)
        _load_pem(pem, settings.keystore)
        return pem.key, pem.certificates
    certificate, key = _check_pair(settings, setting)
    _load_files(certificate, key)
    return key.read_bytes(), certificate.read_bytes()


def _from_keystore(settings: Settings) -> bool:
    return (
        settings.keystore is not None
        and settings.certificate_file is None
        and settings.private_key_file is None
    )


def _check_pair(settings: Settings, setting: str) -> tuple[Path, Path]:
    """Check the files of the certificate and the key, and return their paths."""
    certificate, key = settings.certificate_file, settings.private_key_file
    if certificate is None or key is None:
        missing = " and ".join(
            name
            for name in ("certificate_file", "private_key_file")
            if getattr(settings, name) is None
        )
        raise SettingError(
            f"{setting} is {getattr(settings, setting)}, so {missing} must be set, or keystore."
            f" {CREATE_HINT}"
        )
    _check_pem(certificate, "certificate_file", "CERTIFICATE")
    _check_pem(key, "private_key_file", "PRIVATE KEY")
    if key.stat().st_mode & stat.S_IROTH:
        logger.warning(
            "every user of this machine can read the private key; run `chmod 600 %s`", key
        )
    return certificate, key


def _check_pem(path: Path, name: str, kind: str) -> None:
    try:
        text = path.read_text("latin-1")
    except OSError as error:
        raise SettingError(f"{name}: cannot read {path}: {error.strerror}.") from error
    if f"{kind}-----" in text:
        return
    if "-----BEGIN " in text:
        actual_kind = text.partition("-----BEGIN ")[2].partition("-----")[0]
        raise SettingError(
            f"{name}: {path} holds a {actual_kind}, not a {kind}. Are certificate_file and"
            " private_key_file swapped?"
        )
    command = (
        "openssl x509 -inform DER -in FILE -out cert.pem"
        if kind == "CERTIFICATE"
        else "openssl pkey -inform DER -in FILE -out key.pem"
    )
    raise SettingError(
        f"{name}: {path} is not PEM (it has no -----BEGIN {kind}----- line). From DER: {command}"
    )


def _load_files(certificate: Path, key: Path) -> ssl.SSLContext:
    def refuse_password() -> str:
        raise SettingError(
            f"private_key_file: {key} is encrypted. Write it without a password: openssl pkey -in"
            f" {key} -out key.pem"
        )

    context = server_context()
    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingError(
                f"The key in {key} (private_key_file) does not belong to the first certificate in"
                f" {certificate} (certificate_file). Use a matching pair, with the server's own"
                " certificate before its chain."
            ) from error
        pair = f"certificate_file {certificate} and private_key_file {key}"
        raise SettingError(f"{pair} cannot be used: {_reason(error)}") from error
    return context


def _load_pem(pem: Pem, keystore: Path) -> ssl.SSLContext:
    context = server_context()
    try:
        # `load_cert_chain` can read keys and certificates only from files.
        with _as_file(pem.certificates) as certificates, _as_file(pem.key) as key:
            context.load_cert_chain(certificates, key)
    except ssl.SSLError as error:
        raise SettingError(
            f"keystore {keystore}: its key and certificate cannot be used: {_reason(error)}"
        ) from error
    return context


def server_context() -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later, without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION  # `server/tls_transport.py` relies on this.
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file with `content`; on Linux it is in memory, not on a disk."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("tsx-tls"), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
        return
    # Other users cannot read this directory.
    with tempfile.TemporaryDirectory(dir=temporary_directory()) as directory:
        path = Path(directory, "pair.pem")
        with open(path, "xb", opener=private_opener) as file:
            file.write(content)
        yield str(path)


def _reason(error: ssl.SSLError) -> str:
    hint = (
        f" OpenSSL requires a larger one here. {CREATE_HINT}"
        if "SMALL" in str(error.reason)
        else ""
    )
    return f"{error.reason or error}.{hint}"


def is_trusted_as(host: str, settings: Settings) -> bool:
    """Tell whether a client that trusts the certificate accepts it for a host name.

    This performs the handshake of such a client (`curl --cacert`) in memory.
    """
    if settings.certificate_file is None or settings.private_key_file is None:
        return False  # With a keystore, there is no certificate file that clients could trust.
    context = ssl.create_default_context(cafile=settings.certificate_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    server = _load_files(settings.certificate_file, settings.private_key_file).wrap_bio(
        to_server, to_client, server_side=True
    )
    for endpoint in (client, server, client):
        try:
            endpoint.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return False
    return True
