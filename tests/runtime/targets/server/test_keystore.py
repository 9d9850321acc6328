"""Keystores of Java's keytool, and errors of those that cannot be opened."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.server.keystore import read_keystore
from tsx_runtime.targets.server.tls import is_trusted_as, tls_context

pytest.importorskip("cryptography")
FORMS = ("PKCS12", "JKS")
MAKE = "-genkeypair -alias ts -keyalg RSA -dname CN=localhost -ext SAN=dns:localhost"
# Options for a program that ends before Java has become fast.
QUICK = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")


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
    done = subprocess.run(
        ["keytool", *QUICK, *arguments, *store],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_a_keystore_speaks_tls_with_its_own_certificate(keystores: Path, form: str) -> None:
    settings = Settings(inference_address="https://127.0.0.1:8443", keystore=keystores / form)
    context = tls_context(settings)
    assert context is not None
    assert not is_trusted_as("localhost", settings)
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    theirs.settimeout(30)

    def answer() -> None:
        with context.wrap_socket(theirs, server_side=True) as server:
            server.sendall(b"hello")

    thread = threading.Thread(target=answer)
    thread.start()
    trusting = ssl.create_default_context(cafile=str(keystores / "ts.cer"))
    with trusting.wrap_socket(ours, server_hostname="localhost") as client:
        assert client.recv(5) == b"hello"
    thread.join()


def test_the_kind_is_reported_by_its_bytes(keystores: Path) -> None:
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
def test_a_keystore_that_gives_no_key_is_named_with_the_reason(
    keystores: Path, name: str, password: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=r"^keystore: ") as exc_info:
        read_keystore(keystores / name, password)
    assert reason in exc_info.value.message
    assert password not in exc_info.value.message.replace(reason, "") or name == "none"


def test_bytes_that_are_no_keystore_are_refused(keystores: Path, tmp_path: Path) -> None:
    content = (keystores / "JKS").read_bytes()
    for junk in (
        b"",
        b"junk",
        content[:100],
        b"\xfe\xed\xfe\xed",
        content[:-1] + bytes([content[-1] ^ 1]),
    ):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(SettingError):
            read_keystore(tmp_path / "junk", "changeit")
