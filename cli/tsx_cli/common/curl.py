"""Shell commands that send requests with curl."""

from __future__ import annotations

import shlex

from tsx_runtime.http.tls import is_trusted_as
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings


def curl(
    address: str, path: str, settings: Settings, *arguments: str, with_token: bool = False
) -> str:
    """Return a curl command that also trusts the server's certificate.

    Raises:
        SettingError: A certificate setting is invalid.
        OSError: The certificate cannot be read.
    """
    parsed, command = parse_address(address), ["curl", f"{address}{path}"]
    if parsed.scheme == "unix":
        command = ["curl", "--unix-socket", parsed.path, f"http://localhost{path}"]
    elif parsed.scheme == "https":
        command[1:1] = (
            ["--cacert", str(settings.certificate_file)]
            if is_trusted_as(parsed.host, settings)
            else ["-k"]
        )
    needs_token = (
        with_token
        and settings.inference_token is not None
        and not settings.disable_token_authorization
    )
    return shlex.join([*command, *arguments]) + (
        ' -H "Authorization: Bearer $TSX_INFERENCE_TOKEN"' if needs_token else ""
    )
