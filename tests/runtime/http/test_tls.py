"""The certificate of https addresses, and the errors of unusable ones."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from tests.support.certificates import Pair, make_certificate
from tsx_runtime.errors import SettingError
from tsx_runtime.http.tls import is_trusted_as, tls_context
from tsx_runtime.settings.schema import Settings


@pytest.fixture(scope="module")
def certificate_pair(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def settings(
    certificate: Path | None, key: Path | None, address: str = "https://127.0.0.1:8443"
) -> Settings:
    return Settings(management_address=address, certificate_file=certificate, private_key_file=key)


def refusal(certificate: Path | None, key: Path | None) -> str:
    with pytest.raises(SettingError) as exc_info:
        tls_context(settings(certificate, key))
    return exc_info.value.message


def test_a_certificate_and_key_enable_tls_1_2_and_later(certificate_pair: Pair) -> None:
    context = tls_context(settings(*certificate_pair))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_certificate_without_an_https_address_is_reported(
    certificate_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    assert tls_context(Settings()) is None
    assert not caplog.records
    assert tls_context(settings(*certificate_pair, address="unix:/run/tsx.sock")) is None
    assert "nothing is encrypted" in caplog.text


def test_an_https_address_needs_certificate_and_key(certificate_pair: Pair) -> None:
    assert "certificate_file and private_key_file must be set" in refusal(None, None)
    message = refusal(certificate_pair.certificate, None)
    assert "so private_key_file must be set" in message
    assert "openssl req -x509" in message


def test_an_unusable_certificate_or_key_is_reported_with_the_reason(
    certificate_pair: Pair, tmp_path: Path
) -> None:
    other_pair = make_certificate(tmp_path, "other")
    encrypted_pair = make_certificate(tmp_path, "locked", password="secret")
    invalid_file = tmp_path / "junk"
    invalid_file.write_bytes(b"\x30\x82\x00\xff")
    truncated_file = tmp_path / "torn"
    truncated_file.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n")
    missing_file = tmp_path / "none"
    assert f"certificate_file: cannot read {missing_file}" in refusal(
        missing_file, certificate_pair.key
    )
    assert f"private_key_file: cannot read {tmp_path}" in refusal(
        certificate_pair.certificate, tmp_path
    )
    assert "is not PEM" in refusal(invalid_file, certificate_pair.key)
    assert "openssl pkey -inform DER" in refusal(certificate_pair.certificate, invalid_file)
    assert "swapped?" in refusal(certificate_pair.key, certificate_pair.certificate)
    assert "does not belong to" in refusal(other_pair.certificate, certificate_pair.key)
    assert "is encrypted" in refusal(encrypted_pair.certificate, encrypted_pair.key)
    assert "cannot be used" in refusal(truncated_file, certificate_pair.key)


def test_a_too_small_key_is_reported_with_a_command(processes: None, tmp_path: Path) -> None:
    if ssl.create_default_context().security_level != 2:
        pytest.skip("this OpenSSL takes other keys")
    small_pair = make_certificate(tmp_path, "small", rsa=1024)
    message = refusal(small_pair.certificate, small_pair.key)
    assert f"{small_pair.key} cannot be used: EE_KEY_TOO_SMALL" in message
    assert "openssl req -x509 -newkey rsa:2048" in message


def test_a_world_readable_key_is_reported(
    certificate_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    tls_context(settings(*certificate_pair))
    assert not caplog.records
    key = tmp_path / "open.key"
    key.write_bytes(certificate_pair.key.read_bytes())
    key.chmod(0o644)
    tls_context(settings(certificate_pair.certificate, key))
    assert f"chmod 600 {key}" in caplog.text


def test_a_certificate_is_trusted_for_its_own_names(certificate_pair: Pair) -> None:
    assert is_trusted_as("localhost", settings(*certificate_pair))
    assert is_trusted_as("127.0.0.1", settings(*certificate_pair))
    assert not is_trusted_as("0.0.0.0", settings(*certificate_pair))
