"""The function by which a handler sends parts of its responses before it returns.

See docs/reference/torchserve.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_runtime.errors import PredictionFailed
from tsx_runtime.worker.codecs.responses import encode_body
from tsx_runtime.worker.exceptions import PredictionException
from tsx_runtime.worker.handler_api.context import Context


def send_intermediate_predict_response(
    ret: Sequence[Any] | Mapping[int, Any],
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context,
) -> None:
    """Send `ret[idx]` to each request idx of `req_id_map`.

    A code other than 200 ends the batch with `message` as its error.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # Only the first process of a parallel model answers.
    if code != 200:
        raise PredictionException(message, code)
    if len(ret) != len(req_id_map):
        raise PredictionFailed(
            f"number of batch response mismatched, expect: {len(req_id_map)}, got: {len(ret)} parts"
            " of an answer."
        )
    for (idx, request_id), value in zip(
        req_id_map.items(), ret.values() if isinstance(ret, Mapping) else ret, strict=True
    ):
        # A thread that is still running after its batch must not write into another client's
        # response.
        if context.get_request_id(idx) != request_id:
            context.log_dropped_piece(request_id)
            continue
        context.send_piece(idx, encode_body(value, context.json_nan))
