"""The text generator of one model, which joins its tokenizer, chat template and engine."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from tsx_runtime.features.generation.worker import chat_templates
from tsx_runtime.features.generation.worker.interface import (
    GenerationEngine,
    Media,
    Prompt,
    Sampling,
    TextPiece,
    Tokens,
)
from tsx_runtime.features.generation.worker.media import MediaFile, MediaProcessor
from tsx_runtime.features.generation.worker.metrics import (
    ENGINE_INTERVAL_S,
    GenerationMetrics,
    TokenTimes,
)
from tsx_runtime.features.generation.worker.text import (
    INCOMPLETE_CHAR,
    Detokenizer,
    StopStrings,
    vocabulary_bytes,
)
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import InvalidInput, describe_error


class TextGenerator:
    """A model that continues texts and chats."""

    def __init__(
        self,
        tokenizer: Any,
        engine: GenerationEngine,
        defaults: Any,
        vocabulary: int,
        metrics: GenerationMetrics,
        media: MediaProcessor | None = None,
    ) -> None:
        """Create the generator from the parts of a model.

        Args:
            tokenizer: The tokenizer.
            engine: The engine.
            defaults: The model's generation_config.json.
            vocabulary: The number of token ids.
            metrics: The metrics of the worker.
            media: The processor of images and sounds; None if the model reads text only.
        """
        self.context_length = engine.context_length
        self._tokenizer = tokenizer
        self._max_text_chars = max(map(len, tokenizer.get_vocab())) * engine.context_length
        self._engine = engine
        self.media = media
        self._renderer = tokenizer if media is None else media.processor
        self.chat_template = str(self._renderer.chat_template or "")
        self.response_template = getattr(tokenizer, "response_template", None)
        self._defaults = defaults
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._tenant = ""
        # The tokenizer's backend decodes ten times faster than transformers' own `decode`.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # Tokenizers of mistral-common have neither a backend nor added tokens.
        added_tokens = {} if backend is None else backend.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: token_id for token_id, token in added_tokens.items() if token.special
        }
        self._decode = (
            partial(tokenizer.decode, clean_up_tokenization_spaces=False)
            if backend is None
            else backend.decode
        )

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that requests may choose now."""
        return self._engine.adapters

    async def set_adapter(self, name: str, directory: str | None) -> None:
        """Take an adapter while requests run, or drop it if `directory` is None.

        Raises:
            LoadError: The adapter cannot be served.
        """
        if directory is None:
            self._engine.remove_adapter(name)
        else:
            await self._engine.add_adapter(name, Path(directory))

    def for_tenant(self, tenant: str) -> TextGenerator:
        """Return this generator for the requests of a tenant, who shares no cache with others."""
        generator = copy.copy(self)
        generator._tenant = tenant
        return generator

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the tokens of a text.

        `stream` refuses prompts that are too long. A text that is much longer is refused here,
        since its tokenization would take seconds.

        Raises:
            RefusedField: The text is much too long.
        """
        self._check_length(text)
        return list(self._tokenizer(text, verbose=False, **options)["input_ids"])

    def _check_length(self, text: str) -> None:
        """Check that the context can hold a text, without its tokens.

        Raises:
            RefusedField: The text is much too long.
        """
        if len(text) > self._max_text_chars:
            raise RefusedField(
                f"This model's maximum context length is {self.context_length} tokens, which cannot"
                f" hold the {len(text):,} characters of the prompt. Shorten it.",
                code="context_length_exceeded",
            )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        files: Sequence[MediaFile] = (),
    ) -> Prompt:
        """Encode messages by the chat template, up to the beginning of the assistant's turn.

        Args:
            messages: The messages.
            tools: The tools that the assistant may call.
            variables: Further variables of the template.
            files: The images and sounds, in the order of their parts of messages, such as
                `{"type": "image"}`. Only a model with `media` takes them.

        Raises:
            RefusedField: The template ignores the tools, a file cannot be used, or the chat is
                much too long.
            InvalidInput: The model has no chat template, or it refuses the messages or variables.
        """
        if not self.chat_template:
            raise InvalidInput(
                "This model has no chat template, so it takes plain text only: send a prompt"
                " instead of messages."
            )
        render = self._renderer.apply_chat_template
        if variables and (
            names := {*signature(render).parameters, "conversations", "messages", "self"}
            & variables.keys()
        ):
            raise InvalidInput(
                f"The field 'chat_template_kwargs' cannot set {', '.join(sorted(names))}, which"
                " the server sets itself."
            )
        if self.media is not None:
            messages = [
                {**message, "content": [{"type": "text", "text": text}]}
                if isinstance(text := message.get("content"), str)
                else message
                for message in messages
            ]
        options = {"add_generation_prompt": True, "tokenize": False, **(variables or {})}
        try:
            chat_templates.limit_next_rendering(self.context_length)
            text = render(list(messages), tools=list(tools) or None, **options)
            chat_templates.limit_next_rendering(self.context_length)
            ignores_tools = bool(tools) and text == render(list(messages), **options)
        # A template may raise any error, and reports invalid messages so.
        except Exception as error:
            raise InvalidInput(
                f"The model's chat template refuses these messages: {describe_error(error)}"
            ) from error
        if ignores_tools:
            raise RefusedField(
                "The model's chat template knows no tools. Send the request without 'tools', or"
                " serve a model that has them.",
                "tools",
            )
        if self.media is not None:
            self._check_length(text)
            return self.media.encode(text, files)
        return Prompt(self.encode(text, add_special_tokens=False))

    def decode(
        self, token_ids: Sequence[int], visible_tokens: Collection[str] = frozenset()
    ) -> str:
        """Return the text of tokens, without special tokens other than `visible_tokens`."""
        if not visible_tokens:
            return str(self._decode(list(token_ids), skip_special_tokens=True))
        hidden_ids = {
            token_id
            for token, token_id in self.special_tokens.items()
            if token not in visible_tokens
        }
        ids = [token_id for token_id in token_ids if token_id not in hidden_ids]
        return str(self._decode(ids, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be a part of a character."""
        # Some decoders drop the space before the first token, so the second one is read.
        text = self.decode([token_id, token_id])[len(self.decode([token_id])) :]
        return (
            vocabulary_bytes(self._tokenizer.convert_ids_to_tokens(token_id))
            if INCOMPLETE_CHAR in text
            else text.encode()
        )

    def stream(
        self, prompt: Sequence[int], sampling: Sampling, media: Media | None = None
    ) -> AsyncGenerator[TextPiece, None]:
        """Check the arguments, and return a generator of the pieces of a prompt's continuation.

        Close the generator (`contextlib.aclosing`) unless it is read to its last piece. It raises
        `EngineDied` if the engine has ended.

        Raises:
            RefusedField: The context does not hold the prompt and `max_tokens`.
            InvalidInput: The prompt or the parameters do not fit the model.
            Unavailable: Too many sequences wait.
        """
        if sampling.adapter is not None and sampling.adapter not in self.adapters:
            raise InvalidInput(
                f"This model has no adapter {sampling.adapter!r}."
                f" {describe_adapters(self.adapters)}"
            )
        if (refusal := self._engine.refusal(sampling)) is not None:
            raise InvalidInput(f"The request cannot be answered: {refusal}.")
        if not prompt:
            raise InvalidInput("The prompt has 0 tokens. Send some text.")
        remaining_tokens = self.context_length - len(prompt)
        if remaining_tokens < (sampling.max_tokens or 1):
            # Clients such as LiteLLM recognize the beginning of OpenAI's message.
            raise RefusedField(
                f"This model's maximum context length is {self.context_length} tokens. However, the"
                f" prompt has {len(prompt)} tokens, and {sampling.max_tokens or 'at least one'} may"
                " follow. Shorten the prompt, or ask for fewer.",
                code="context_length_exceeded",
            )
        for field, ids in (("The prompt", prompt), ("logit_bias", sampling.logit_bias or ())):
            if any(not 0 <= token < self._vocabulary for token in ids):
                raise InvalidInput(
                    f"{field} holds token ids that this model does not have: they are 0 to"
                    f" {self._vocabulary - 1}."
                )
        sampling = replace(
            apply_defaults(sampling, self._defaults, remaining_tokens),
            cache_salt=f"{self._tenant} {sampling.cache_salt}",
        )
        return self._pieces(self._engine.generate(prompt, sampling, media), prompt, sampling)

    async def _pieces(
        self, token_stream: AsyncGenerator[Tokens, None], prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[TextPiece, None]:
        decode = partial(self.decode, visible_tokens=sampling.visible_tokens)
        detokenizer, stops = Detokenizer(decode, prompt), StopStrings(sampling.stop)
        timing = TokenTimes()
        try:
            async with aclosing(token_stream):
                async for ids, finish_reason, logprobs, cached_tokens in token_stream:
                    timing.record(len(ids), cached_tokens)
                    if timing.last_token_at > self._metrics.engine_reported_at + ENGINE_INTERVAL_S:
                        self._metrics.report_engine(self._engine.stats())
                    # The last token only marks the end, so its text is left out.
                    text = detokenizer.push(ids[:-1] if finish_reason == "stop" else ids)
                    if finish_reason:
                        text += detokenizer.finish()
                    text, stop = stops.push(text)
                    if finish_reason or stop is not None:
                        break
                    yield TextPiece(
                        text, len(ids), None, logprobs, ids, cached_tokens=cached_tokens
                    )
        finally:
            self._metrics.report(sampling.adapter, len(prompt), timing, self._engine.stats())
        if stop is None:
            text += stops.finish()
        reason = finish_reason if stop is None else "stop"
        yield TextPiece(text, len(ids), reason, logprobs, ids, stop, cached_tokens)


def describe_adapters(names: Sequence[str]) -> str:
    """Return a sentence about the adapters of a model, for errors."""
    return f"It has {', '.join(names) or 'none'}."


def apply_defaults(sampling: Sampling, defaults: Any, remaining_tokens: int) -> Sampling:
    """Replace parameters that are None by the values of generation_config.json.

    If these are missing, decoding is greedy, up to the end of the context.
    """

    def default(name: str) -> Any:
        return getattr(defaults, name, None)

    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    samples_by_default = bool(default("do_sample"))
    if temperature is None:
        is_random = samples_by_default or top_k is not None or top_p is not None
        temperature = (default("temperature") or 1.0) if is_random else 0.0
    if samples_by_default:
        top_k = default("top_k") if top_k is None else top_k
        top_p = default("top_p") if top_p is None else top_p
    return replace(
        sampling,
        max_tokens=sampling.max_tokens
        or min(default("max_new_tokens") or remaining_tokens, remaining_tokens),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=sampling.repetition_penalty or default("repetition_penalty") or 1.0,
    )
