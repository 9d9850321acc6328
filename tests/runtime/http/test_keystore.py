"""Keystores of Java's keytool, and the errors of unusable ones."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from tsx_runtime.errors import SettingError
from tsx_runtime.http.keystore import read_keystore
from tsx_runtime.http.tls import is_trusted_as, tls_context
from tsx_runtime.settings.schema import Settings

pytest.importorskip("cryptography")
FORMS = ("PKCS12", "JKS")
MAKE = "-genkeypair -alias ts -keyalg RSA -dname CN=localhost -ext SAN=dns:localhost"
# Options that make a short-lived Java program start faster.
QUICK_START = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")


@pytest.fixture(scope="module")
def keystores(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("keytool") is None:
        pytest.skip("needs Java's keytool")
    directory = tmp_path_factory.mktemp("keystores")
    keytool(directory / "PKCS12", "PKCS12", *MAKE.split())
    convert = ["-importkeystore", "-srckeystore", directory / "PKCS12", "-srcstorepass", "changeit"]
    keytool(directory / "JKS", "JKS", *convert)
    (directory / "ts.cer").write_bytes(read_keystore(directory / "PKCS12", "changeit").certificates)
    for form in FORMS:
        certificate = ["-importcert", "-noprompt", "-alias", "c", "-file", directory / "ts.cer"]
        keytool(directory / f"{form}-without-key", form, *certificate)
    keytool(directory / "JCEKS", "JCEKS", *convert)
    make = MAKE.replace("RSA", "EC").split()
    keytool(directory / "other-key-password", "JKS", *make, "-keypass", "something")
    return directory


def keytool(path: Path, form: str, *arguments: str | Path) -> None:
    store = ["-keystore", path, "-storetype", form, "-storepass", "changeit"]
    result = subprocess.run(
        ["keytool", *QUICK_START, *arguments, *store],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("form", FORMS)
def test_a_keystores_certificate_is_used_for_tls(keystores: Path, form: str) -> None:
    settings = Settings(inference_address="https://127.0.0.1:8443", keystore=keystores / form)
    context = tls_context(settings)
    assert context is not None
    assert not is_trusted_as("localhost", settings)
    own_socket, other_socket = socket.socketpair()
    own_socket.settimeout(30)
    other_socket.settimeout(30)

    def answer() -> None:
        with context.wrap_socket(other_socket, server_side=True) as server:
            server.sendall(b"hello")

    thread = threading.Thread(target=answer)
    thread.start()
    trusting_context = ssl.create_default_context(cafile=str(keystores / "ts.cer"))
    with trusting_context.wrap_socket(own_socket, server_hostname="localhost") as client:
        assert client.recv(5) == b"hello"
    thread.join()


def test_the_keystore_type_is_detected_from_its_content(keystores: Path) -> None:
    assert read_keystore(keystores / "JKS", "changeit").key.startswith(
        b"-----BEGIN PRIVATE KEY-----\n"
    )
    assert read_keystore(keystores / "PKCS12", "changeit").certificates.startswith(
        b"-----BEGIN CERTIFICATE-----\n"
    )


@pytest.mark.parametrize(
    ("name", "password", "reason"),
    [
        ("none", "changeit", "cannot read"),
        ("JKS", "wrong", "keystore_pass"),
        ("PKCS12", "wrong", "keystore_pass"),
        ("JKS-without-key", "changeit", "contains no private key"),
        ("PKCS12-without-key", "changeit", "contains no private key"),
        ("other-key-password", "changeit", "the password of its key differs"),
        ("JCEKS", "changeit", "has the type JCEKS"),
    ],
)
def test_a_keystore_without_a_usable_key_is_reported_with_the_reason(
    keystores: Path, name: str, password: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=r"^keystore: ") as exc_info:
        read_keystore(keystores / name, password)
    assert reason in exc_info.value.message
    assert password not in exc_info.value.message.replace(reason, "") or name == "none"


def test_invalid_keystore_bytes_are_refused(keystores: Path, tmp_path: Path) -> None:
    content = (keystores / "JKS").read_bytes()
    for invalid_bytes in (
        b"",
        b"junk",
        content[:100],
        b"\xfe\xed\xfe\xed",
        content[:-1] + bytes([content[-1] ^ 1]),
    ):
        (tmp_path / "junk").write_bytes(invalid_bytes)
        with pytest.raises(SettingError):
            read_keystore(tmp_path / "junk", "changeit")
