"""The health check of an image, `python -m tsx_runtime.targets.health`.

The exit code is 0 if the server is ready. Otherwise it is 1, and the reason is written to stderr.
The check needs no program such as curl. It reads the server's address from the same variables and
files as the entry point.
"""

import sys

if __name__ == "__main__":  # This comes before every other import, even that of __future__.
    from tsx_runtime.shared.safe_path import remove_working_directory

    remove_working_directory()

import http.client
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from tsx_runtime.errors import TsxError
from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.sources import find_config
from tsx_runtime.targets.image.environment import TARGET, locate_model, read_settings

PATH = "/readyz"
TIMEOUT_S = 4.0  # must be less than the timeout of the image's HEALTHCHECK, which is 5 s


def main(env: Mapping[str, str]) -> int:
    try:
        status, text = _request(_find_address(env))
    except (OSError, http.client.HTTPException, TsxError) as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1
    if status == http.client.OK:
        return 0
    print(f"not healthy: {status} {text}", file=sys.stderr)
    return 1


def _find_address(env: Mapping[str, str]) -> Address:
    """Return the management address, or the inference address if that is a unix socket.

    The management address is preferred, because it still answers while the server drains.
    """
    server_env = {name: value for name, value in env.items() if name != TARGET}
    settings = read_settings(
        server_env, locate_model(server_env), find_config(None, env, Path.cwd()), []
    )
    addresses = [
        parse_address(text) for text in (settings.management_address, settings.inference_address)
    ]
    address = next((candidate for candidate in addresses if candidate.scheme != "unix"), None)
    if address is None:
        raise TsxError(
            "neither management_address nor inference_address is an http or https address, which"
            " the health check needs"
        )
    return address._replace(
        host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    )


def _request(address: Address) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    if address.scheme == "https":
        context = ssl.create_default_context()
        # The server is in the same container, and its certificate does not have this local name.
        context.check_hostname, context.verify_mode = (False, ssl.CERT_NONE)
        connection = http.client.HTTPSConnection(
            address.host, address.port, timeout=TIMEOUT_S, context=context
        )
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        return response.status, response.read(2000).decode(errors="replace").strip()
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main(os.environ))
