"""The options of commands that call the management API."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from tsx_cli.common.client import Server
from tsx_cli.common.options import Config, Url, read_settings, with_options


def management(url: Url = None, config: Config = None) -> Server:
    """Return a client for the management address of a server."""
    settings, _ = read_settings(config)
    address = url or settings.management_address
    return Server(
        address, settings.management_token, role="management", certificate=settings.certificate_file
    )


class Addresses(NamedTuple):
    """Clients for both addresses of a server."""

    management: Server
    inference: Server


def both_addresses(
    url: Url = None,
    inference_url: Annotated[
        str | None,
        typer.Option(
            help="Address for predictions; by default from the settings, as is its token."
        ),
    ] = None,
    config: Config = None,
) -> Addresses:
    """Return clients for the management and the inference address of a server."""
    return Addresses(management(url, config), inference(inference_url, config))


def inference(url: Url = None, config: Config = None) -> Server:
    """Return a client for the inference address of a server."""
    settings, _ = read_settings(config)
    address = url or settings.inference_address
    return Server(address, settings.inference_token, certificate=settings.certificate_file)


with_server = with_options(management, last=True)  # The command gets a `Server`.
with_inference = with_options(inference, last=True)
with_both = with_options(both_addresses, last=True)
