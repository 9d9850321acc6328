"""The key and the certificates of a Java keystore, as PEM.

JKS is read here; PKCS12 by `cryptography`, from the extra `keystore`.
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
_WHITENER = b"Mighty Aphrodite"  # of the digest at a keystore's end
_DIGEST = 20  # bytes of SHA-1, which is what JKS has
_SUN_KEY_PROTECTOR = bytes.fromhex(
    "060a2b060104012a02110101"
)  # the object identifier 1.3.6.1.4.1.42.2.17.1.1
_CONVERT = "keytool -importkeystore -srckeystore {path} -destkeystore new.p12 -deststoretype PKCS12"


class Pem(NamedTuple):
    certificates: bytes  # the server's own first, then its chain
    key: bytes


def read_keystore(path: Path, password: str) -> Pem:
    """The first key of it, as in TorchServe; the kind is detected by the first bytes.

    Raises SettingError.
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
    except ImportError:  # an extra
        hint = "pip install 'tsx-serve[keystore]', or set certificate_file and private_key_file"
        raise SettingError(f"keystore: reading PKCS12 needs a library; {hint}") from None
    found = pkcs12.load_pkcs12(data, password.encode())
    if found.key is None or found.cert is None:
        return None
    chain = [found.cert, *found.additional_certs]
    key = found.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pem(b"".join(each.certificate.public_bytes(Encoding.PEM) for each in chain), key)


def _read_jks(data: bytes, password: str) -> Pem | None:
    """The layout is that of `sun.security.provider.JavaKeyStore`: magic, version, count, entries,
    SHA-1 over all of it.
    """
    content, digest = data[:-_DIGEST], data[-_DIGEST:]
    secret = password.encode("utf-16-be")
    if not hmac.compare_digest(hashlib.sha1(secret + _WHITENER + content).digest(), digest):
        raise ValueError("the password does not match its digest")
    stream = _Reader(content[len(JKS) :])
    version, count = stream.number(), stream.number()
    for _ in range(count):
        kind = stream.number()
        stream.text()  # the alias
        stream.exactly(8)  # the time
        if kind == _CERTIFICATE_ENTRY:
            _certificate(stream, version)
        elif kind == _KEY_ENTRY:
            protected = stream.exactly(stream.number())
            chain = [_certificate(stream, version) for _ in range(stream.number())]
            return Pem(
                b"".join(_pem("CERTIFICATE", each) for each in chain),
                _pem("PRIVATE KEY", _recover(protected, secret)),
            )
        else:
            raise ValueError(f"it has an entry of the unknown kind {kind}")
    return None


class _Reader:
    """Java's DataInputStream."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def number(self) -> int:
        return int.from_bytes(self.exactly(4), "big")

    def text(self) -> bytes:
        return self.exactly(int.from_bytes(self.exactly(2), "big"))


def _certificate(stream: _Reader, version: int) -> bytes:
    if version > 1:
        stream.text()  # X.509
    return stream.exactly(stream.number())


def _recover(protected: bytes, secret: bytes) -> bytes:
    """PKCS8 from Sun's key protector: salt, key xor a chain of SHA-1, and a digest of the key."""
    algorithm, encrypted = _two_parts(protected)
    if _SUN_KEY_PROTECTOR not in algorithm:
        raise ValueError("its key uses a protection that JKS does not define")
    salt, body, digest = encrypted[:_DIGEST], encrypted[_DIGEST:-_DIGEST], encrypted[-_DIGEST:]
    pad, link = b"", salt
    while len(pad) < len(body):
        link = hashlib.sha1(secret + link).digest()
        pad += link
    key = bytes(a ^ b for a, b in zip(body, pad, strict=False))
    if not hmac.compare_digest(hashlib.sha1(secret + key).digest(), digest):
        raise ValueError("the password of its key differs from that of the keystore")
    return key


def _two_parts(der: bytes) -> tuple[bytes, bytes]:
    """Of a DER sequence of two: EncryptedPrivateKeyInfo."""
    inside, _ = _der_element(der)
    first, rest = _der_element(inside)
    second, _ = _der_element(rest)
    return first, second


def _der_element(der: bytes) -> tuple[bytes, bytes]:
    """The content of the first element, and what follows it."""
    length, at = der[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(der[2:at], "big")
    return der[at : at + length], der[at + length :]


def _pem(kind: str, der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", kind).encode()
