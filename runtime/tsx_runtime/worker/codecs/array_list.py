"""A numpy array whose truth value is that of a list."""

from __future__ import annotations

from typing import Any

import numpy as np


class ListLike(np.ndarray[Any, Any]):
    """An array that is true if it has elements, like a list.

    Handlers write `row.get("data") or row.get("body")`; a plain numpy array raises an error there.
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

        Otherwise `if array > 5` would be true for every array with elements.
        """
        plain_inputs = [_plain(value) for value in inputs]
        if out is not None:
            options["out"] = tuple(_plain(value) for value in out)
        return getattr(ufunc, method)(*plain_inputs, **options)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, ListLike) else value
