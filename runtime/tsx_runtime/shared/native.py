"""A decorator for classes in the modules that `hatch_build.py` compiles with mypyc.

The decorator has no effect in pure Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr  # installed with mypy only
else:
    ClassT = TypeVar("ClassT", bound=type)

    def mypyc_attr(**attributes: bool) -> Callable[[ClassT], ClassT]:
        return lambda cls: cls
