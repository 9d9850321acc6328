"""The health check of an image, `python -m tsx_runtime.targets.health`: exit code 0 where the
server can serve, else 1 and the reason.

It needs no program beside Python, and finds the server by the same variables and files as the
entry.
"""

import sys

if __name__ == "__main__":  # not even __future__ may be imported before this
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
from tsx_runtime.targets.image.environment import TARGET, locate_model, settings_of

PATH = "/readyz"
TIMEOUT = 4.0  # seconds: below the five that the image's HEALTHCHECK gives


def main(env: Mapping[str, str]) -> int:
    try:
        status, text = _request(_where(env))
    except (OSError, http.client.HTTPException, TsxError) as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1
    if status == http.client.OK:
        return 0
    print(f"not healthy: {status} {text}", file=sys.stderr)
    return 1


def _where(env: Mapping[str, str]) -> Address:
    """The management address where it is a TCP one, since it also answers while the server
    drains.
    """
    given = {name: value for name, value in env.items() if name != TARGET}
    settings = settings_of(given, locate_model(given), find_config(None, env, Path.cwd()), [])
    addresses = [
        parse_address(each) for each in (settings.management_address, settings.inference_address)
    ]
    address = next((each for each in addresses if each.scheme != "unix"), None)
    if address is None:
        raise TsxError(
            "neither management_address nor inference_address is an http or https address, which"
            " the health check needs"
        )
    return address._replace(
        host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    )


def _request(address: Address) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT)
    if address.scheme == "https":
        own = ssl.create_default_context()
        # The server of this container, by a name that is on no certificate.
        own.check_hostname, own.verify_mode = (False, ssl.CERT_NONE)
        connection = http.client.HTTPSConnection(
            address.host, address.port, timeout=TIMEOUT, context=own
        )
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        return response.status, response.read(2000).decode(errors="replace").strip()
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main(os.environ))
