"""The version of tsx, in one place: the distribution, the commands, the API descriptions and the workers read it here."""

__version__ = "0.1.0"
TORCHSERVE_VERSION = "0.12.0"  # the release whose contract tsx keeps; scripts and handlers compare with it
