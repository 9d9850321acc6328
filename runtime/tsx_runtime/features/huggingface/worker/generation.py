"""The handler for Hugging Face models that generate text.

Each request is an asyncio task. The engine generates the texts of all requests together.
"""

from __future__ import annotations

from typing import Any

from tsx_runtime.features.generation.worker import native
from tsx_runtime.features.generation.worker.loading import load
from tsx_runtime.features.generation.worker.pretrained import find_pretrained
from tsx_runtime.features.openai.worker import generation as openai
from tsx_runtime.wire import TENANT_HEADER
from tsx_runtime.worker.exceptions import InvalidInput, form_advice
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import choose_device


class HuggingFaceGeneration:
    """A handler for Hugging Face's inference API, and at OpenAI's paths for OpenAI's API."""

    takes_raw_bodies = True
    joins_pieces = True
    input_kind = "json"

    async def initialize(self, context: Context) -> None:
        """Load the model.

        Raises:
            LoadError: The model cannot be loaded.
        """
        files = find_pretrained(context, choose_device(context.system_properties.get("gpu_id")))
        self.generator = await load(files, context)
        self.set_adapter = self.generator.set_adapter
        self.model, self.precision = context.model_name, files.precision
        if self.generator.chat_template:
            self.input_kind = "chat"

    async def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Return the response to a single request.

        Raises:
            InvalidInput: The request has no body.
        """
        row = data[0]
        body = row.get("body", row.get("data"))
        if body is None:
            text = (
                'The request has no body: send {"inputs": "a text"}, with the header content-type:'
                " application/json."
            )
            raise InvalidInput(text + form_advice(row))
        generator = self.generator.for_tenant(
            str(context.get_request_header(0, TENANT_HEADER.decode()) or "")
        )
        path = str(context.get_request_header(0, "url_path") or "").strip("/")
        if path.startswith("v1/"):
            return [await openai.answer(path, body, generator, context, self.model)]
        return [await native.answer(body, generator, context)]
