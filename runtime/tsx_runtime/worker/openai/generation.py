"""Answers OpenAI's requests for text by a generator: chat completions, completions and responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tsx_runtime.errors import TsxError
from tsx_runtime.worker.exceptions import PredictionException
from tsx_runtime.worker.generation.interface import TextGenerator
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.openai import errors
from tsx_runtime.worker.openai.chat import ChatReply
from tsx_runtime.worker.openai.completions import CompletionReply
from tsx_runtime.worker.openai.fields import Fields, read_document
from tsx_runtime.worker.openai.responses import ResponseReply
from tsx_runtime.worker.openai.streams import Reply, run

REPLIES: dict[str, Callable[[Fields, TextGenerator, str], Reply]] = {
    "v1/chat/completions": ChatReply,
    "v1/completions": CompletionReply,
    "v1/responses": ResponseReply,
}


async def answer(path: str, body: Any, generator: TextGenerator, context: Context, model: str) -> Any:
    """What the handler returns for a request whose header `url_path` is `path`. `body`: bytes, or JSON that is parsed already.

    A streamed answer's parts have been sent then, all but the last. What is wrong with the request is an answer too, in OpenAI's shape.
    """
    try:
        reply = REPLIES.get(path)
        if reply is None:
            raise errors.RefusedField(
                f"Model {model} writes text: it has {', '.join(f'/{each}' for each in REPLIES)}, and no /{path}.", status=404
            )
        return await run(reply(Fields(read_document(body)), generator, model), generator, context)
    except (PredictionException, TsxError) as error:
        return errors.answer(error, context)
