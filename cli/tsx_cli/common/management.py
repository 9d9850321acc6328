"""The options of commands that call the management API."""

from __future__ import annotations

from tsx_cli.common.client import Server
from tsx_cli.common.options import Config, Url, read_settings, with_options


def management(url: Url = None, config: Config = None) -> Server:
    """Return a client for the management address of a server."""
    settings, _ = read_settings(config)
    address = url or settings.management_address
    return Server(
        address, settings.management_token, role="management", certificate=settings.certificate_file
    )


with_server = with_options(management, last=True)  # The command gets a `Server`.
