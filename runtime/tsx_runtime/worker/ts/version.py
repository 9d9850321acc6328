"""The release of TorchServe whose contract tsx keeps; handlers compare with it."""

from tsx_runtime import version

__version__ = version.TORCHSERVE_VERSION
