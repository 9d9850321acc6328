"""The conversion of a Java keystore's key and certificates to PEM.

JKS is parsed here. PKCS12 needs the package `cryptography` of the extra `keystore`.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import ssl
import struct
from pathlib import Path
from typing import NamedTuple

from tsx_runtime.errors import SettingError

JKS, JCEKS = b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce"
_KEY_ENTRY, _CERTIFICATE_ENTRY = 1, 2
_WHITENER = b"Mighty Aphrodite"  # Java adds this to the input of a keystore's digest.
_DIGEST_BYTES = 20  # length of a SHA-1, which JKS uses
# the DER encoding of the object identifier 1.3.6.1.4.1.42.2.17.1.1
_SUN_KEY_PROTECTOR = bytes.fromhex("060a2b060104012a02110101")
_CONVERT = "keytool -importkeystore -srckeystore {path} -destkeystore new.p12 -deststoretype PKCS12"


class Pem(NamedTuple):
    certificates: bytes  # the server's certificate, followed by its chain
    key: bytes


def read_keystore(path: Path, password: str) -> Pem:
    """Return a keystore's first key and its certificates, as TorchServe does.

    Raises:
        SettingError: The keystore cannot be read, or has no key.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingError(f"keystore: cannot read {path}: {error.strerror}.") from error
    if data.startswith(JCEKS):
        raise SettingError(
            f"keystore: {path} has the type JCEKS, which tsx does not read."
            f" {_CONVERT.format(path=path)} converts it"
        )
    try:
        pem = _read_jks(data, password) if data.startswith(JKS) else _read_pkcs12(data, password)
    except (struct.error, EOFError) as error:
        raise SettingError(f"keystore: {path} is damaged: it ends too early.") from error
    except ValueError as error:
        raise SettingError(
            f"keystore: {path} cannot be opened: {error}. Is keystore_pass right?"
        ) from error
    if pem is None:
        raise SettingError(
            f"keystore: {path} contains no private key; `keytool -list -keystore {path}` shows its"
            " content"
        )
    return pem


def _read_pkcs12(data: bytes, password: str) -> Pem | None:
    try:
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            pkcs12,
        )
    except ImportError:  # The extra `keystore` is optional.
        hint = "pip install 'tsx-serve[keystore]', or set certificate_file and private_key_file"
        raise SettingError(f"keystore: reading PKCS12 needs a library; {hint}") from None
    store = pkcs12.load_pkcs12(data, password.encode())
    if store.key is None or store.cert is None:
        return None
    chain = [store.cert, *store.additional_certs]
    key = store.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pem(b"".join(cert.certificate.public_bytes(Encoding.PEM) for cert in chain), key)


def _read_jks(data: bytes, password: str) -> Pem | None:
    """Read a keystore in the format of `sun.security.provider.JavaKeyStore`.

    The format is: magic number, version, number of entries, entries, SHA-1 of all this.
    """
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    secret = password.encode("utf-16-be")
    if not hmac.compare_digest(hashlib.sha1(secret + _WHITENER + content).digest(), digest):
        raise ValueError("the password does not match its digest")
    stream = _Reader(content[len(JKS) :])
    version, count = stream.read_int(), stream.read_int()
    for _ in range(count):
        entry_kind = stream.read_int()
        stream.read_text()  # alias
        stream.read(8)  # creation time
        if entry_kind == _CERTIFICATE_ENTRY:
            _read_certificate(stream, version)
        elif entry_kind == _KEY_ENTRY:
            protected_key = stream.read(stream.read_int())
            chain = [_read_certificate(stream, version) for _ in range(stream.read_int())]
            return Pem(
                b"".join(_pem("CERTIFICATE", certificate) for certificate in chain),
                _pem("PRIVATE KEY", _decrypt_key(protected_key, secret)),
            )
        else:
            raise ValueError(f"it has an entry of the unknown kind {entry_kind}")
    return None


class _Reader:
    """A reader with the methods of Java's DataInputStream."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def read_int(self) -> int:
        return int.from_bytes(self.read(4), "big")

    def read_text(self) -> bytes:
        return self.read(int.from_bytes(self.read(2), "big"))


def _read_certificate(stream: _Reader, version: int) -> bytes:
    if version > 1:
        stream.read_text()  # the type, which is X.509
    return stream.read(stream.read_int())


def _decrypt_key(protected_key: bytes, secret: bytes) -> bytes:
    """Decrypt a key to PKCS8.

    Sun's key protector stores a salt, the key xor a key stream of SHA-1s, and the key's digest.
    """
    algorithm, encrypted = _split_sequence(protected_key)
    if _SUN_KEY_PROTECTOR not in algorithm:
        raise ValueError("its key uses a protection that JKS does not define")
    salt = encrypted[:_DIGEST_BYTES]
    body = encrypted[_DIGEST_BYTES:-_DIGEST_BYTES]
    digest = encrypted[-_DIGEST_BYTES:]
    key_stream, block = b"", salt
    while len(key_stream) < len(body):
        block = hashlib.sha1(secret + block).digest()
        key_stream += block
    key = bytes(a ^ b for a, b in zip(body, key_stream, strict=False))
    if not hmac.compare_digest(hashlib.sha1(secret + key).digest(), digest):
        raise ValueError("the password of its key differs from that of the keystore")
    return key


def _split_sequence(der: bytes) -> tuple[bytes, bytes]:
    """Return the two elements of EncryptedPrivateKeyInfo, which is a DER sequence."""
    elements, _ = _der_element(der)
    first, remainder = _der_element(elements)
    second, _ = _der_element(remainder)
    return first, second


def _der_element(der: bytes) -> tuple[bytes, bytes]:
    """Return the content of the first DER element, and the bytes after it."""
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    return der[start : start + length], der[start + length :]


def _pem(kind: str, der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", kind).encode()
