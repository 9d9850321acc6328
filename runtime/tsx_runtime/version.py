"""The version of tsx, in one place: the distribution, the commands, the API descriptions and the
workers read it here.
"""

from __future__ import annotations

from importlib.util import find_spec

__version__ = "0.1.0"
TORCHSERVE_VERSION = (  # the release whose contract tsx keeps; scripts and handlers compare with it
    "0.12.0"
)


def is_compiled() -> bool:
    """Whether the hot path is the one that `hatch_build.py` compiles, not the same modules in pure
    Python.
    """
    return find_spec("tsx_runtime.hot_path__mypyc") is not None
