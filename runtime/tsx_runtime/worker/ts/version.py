"""The release of TorchServe whose contract tsx keeps; handlers compare with it."""

__version__ = "0.12.0"
