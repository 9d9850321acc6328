"""An array that handlers can use like a list."""

from __future__ import annotations

from typing import Any

import numpy as np


class ListLike(np.ndarray[Any, Any]):
    """Its truth value is that of a list: handlers write `row.get("data") or row.get("body")`, at
    which an array of numpy raises.
    """

    def __bool__(self) -> bool:
        return self.size > 0

    def __array_ufunc__(
        self,
        ufunc: np.ufunc,
        method: str,
        *inputs: Any,
        out: tuple[Any, ...] | None = None,
        **options: Any,
    ) -> Any:
        """Results of operations are plain arrays: `if array > 5` must not be true merely because an
        array exists.
        """
        plain = [_plain(each) for each in inputs]
        if out is not None:
            options["out"] = tuple(_plain(each) for each in out)
        return getattr(ufunc, method)(*plain, **options)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, ListLike) else value
