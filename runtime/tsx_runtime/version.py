"""The version of tsx, in one place: the distribution, the commands, the API descriptions and the workers read it here."""

__version__ = "0.1.0"
