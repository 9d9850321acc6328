"""An array that handlers can use like a list."""

from __future__ import annotations

from typing import Any

import numpy as np


class ListLike(np.ndarray[Any, Any]):
    """An array with the truth value of a list.

    Handlers write `row.get("data") or row.get("body")`, for which an array of numpy raises.
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
        """Return plain arrays from operations.

        `if array > 5` must not be true merely because the array has elements.
        """
        plain = [_plain(value) for value in inputs]
        if out is not None:
            options["out"] = tuple(_plain(value) for value in out)
        return getattr(ufunc, method)(*plain, **options)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, ListLike) else value
