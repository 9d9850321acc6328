"""The generator for the wire formats: tokenizer, chat template and engine of one model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from tsx_runtime.worker.exceptions import InvalidInput, describe_error
from tsx_runtime.worker.generation import chat_templates
from tsx_runtime.worker.generation.interface import GenerationEngine, Sampling, TextPiece, Tokens
from tsx_runtime.worker.generation.metrics import ENGINE_INTERVAL_S, GenerationMetrics, TokenTimes
from tsx_runtime.worker.generation.text import Detokenizer, StopStrings


class TextGenerator:
    """A model that continues texts and chats."""

    def __init__(
        self,
        tokenizer: Any,
        engine: GenerationEngine,
        defaults: Any,
        vocabulary: int,
        metrics: GenerationMetrics,
    ) -> None:
        """Join the parts of a model.

        Args:
            tokenizer: The tokenizer.
            engine: The engine.
            defaults: The model's generation_config.json.
            vocabulary: The number of token ids.
            metrics: The metrics of the worker.
        """
        self.context_length = engine.context_length
        self.adapters = engine.adapters
        self._tokenizer = tokenizer
        self._max_text_chars = max(map(len, tokenizer.get_vocab())) * engine.context_length
        self._engine = engine
        self.has_chat_template = bool(tokenizer.chat_template)
        self._defaults = defaults
        self._vocabulary = vocabulary
        self._metrics = metrics
        # The backend takes a tenth of the time of transformers' own `decode`.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        decode = (
            partial(tokenizer.decode, clean_up_tokenization_spaces=False)
            if fast is None
            else fast.decode
        )
        self._decode = partial(decode, skip_special_tokens=True)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the tokens of a text.

        `stream` refuses prompts that are too long. Much longer texts are refused here, since they
        would take seconds.

        Raises:
            InvalidInput: The text is much too long.
        """
        if len(text) > self._max_text_chars:
            raise InvalidInput(
                f"The prompt has {len(text):,} characters, which the model's context of"
                f" {self.context_length} tokens does not hold. Shorten it."
            )
        return list(self._tokenizer(text, verbose=False, **options)["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode messages by the chat template, ready for the assistant's turn.

        Args:
            messages: The messages.
            tools: The tools that the assistant may call.
            variables: Variables of the template itself.

        Raises:
            InvalidInput: The template refuses the messages, the tools or the variables.
        """
        template = self._tokenizer.chat_template
        if not template:
            raise InvalidInput(
                "This model has no chat template, so it takes plain text only: send a prompt"
                " instead of messages."
            )
        if tools and "tools" not in str(template):
            raise InvalidInput(
                "This model's chat template takes no tools: send the request without them."
            )
        server_names = signature(self._tokenizer.apply_chat_template).parameters.keys() | {
            "conversations",
            "messages",
            "self",
        }
        if reserved := server_names & (variables or {}).keys():
            raise InvalidInput(
                f"The field 'chat_template_kwargs' cannot set {', '.join(sorted(reserved))}, which"
                " the server sets itself."
            )
        chat_templates.begin(self.context_length)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **variables or {},
            )
        # A template raises what its author wrote.
        except Exception as error:
            raise InvalidInput(
                f"The model's chat template refuses these messages: {describe_error(error)}"
            ) from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._decode(list(token_ids)))

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[TextPiece, None]:
        """Generate the continuation of a prompt, after checks at the call.

        Close the result (`contextlib.aclosing`) if its last piece is not awaited. It raises
        `EngineDied` if the engine ends.

        Raises:
            InvalidInput: The prompt or the parameters do not fit the model.
            Unavailable: Too many sequences wait.
        """
        if sampling.adapter is not None and sampling.adapter not in self.adapters:
            known = f"It has {', '.join(self.adapters)}." if self.adapters else "It has none."
            raise InvalidInput(f"This model has no adapter {sampling.adapter!r}. {known}")
        if (refusal := self._engine.refusal(sampling)) is not None:
            raise InvalidInput(f"The request cannot be answered: {refusal}.")
        room = self.context_length - len(prompt)
        if not prompt or room < 1:
            raise InvalidInput(
                f"The prompt has {len(prompt)} tokens; it must have 1 to {self.context_length - 1},"
                f" for the model's context of {self.context_length} holds prompt and answer."
                f" {'Shorten it.' if prompt else 'Send some text.'}"
            )
        for field, ids in (("The prompt", prompt), ("logit_bias", sampling.logit_bias or ())):
            if any(not 0 <= token < self._vocabulary for token in ids):
                raise InvalidInput(
                    f"{field} holds token ids that this model does not have: they are 0 to"
                    f" {self._vocabulary - 1}."
                )
        sampling = with_defaults(sampling, self._defaults, room)
        return self._pieces(self._engine.generate(prompt, sampling), prompt, sampling)

    async def _pieces(
        self, generated: AsyncGenerator[Tokens, None], prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[TextPiece, None]:
        detokenizer, stops, timing = (
            Detokenizer(self._decode, prompt),
            StopStrings(sampling.stop),
            TokenTimes(),
        )
        try:
            async with aclosing(generated):
                async for ids, finished, logprobs in generated:
                    timing.note(len(ids))
                    if timing.last > self._metrics.engine_reported_at + ENGINE_INTERVAL_S:
                        self._metrics.report_engine(self._engine.stats())
                    # The last token ends the text, and is no part of it.
                    text = detokenizer.push(ids[:-1] if finished == "stop" else ids)
                    if finished:
                        text += detokenizer.finish()
                    text, stop = stops.push(text)
                    if finished or stop is not None:
                        break
                    yield TextPiece(text, len(ids), None, logprobs, ids)
        finally:
            self._metrics.report(sampling.adapter, len(prompt), timing, self._engine.stats())
        if stop is None:
            text += stops.finish()
        yield TextPiece(text, len(ids), finished if stop is None else "stop", logprobs, ids, stop)


def with_defaults(sampling: Sampling, defaults: Any, room: int) -> Sampling:
    """Replace None by the values of generation_config.json.

    Without these, decoding is greedy, up to the end of the context.
    """
    draws = bool(getattr(defaults, "do_sample", False))
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if temperature is None:
        is_asked = top_k is not None or top_p is not None
        temperature = (getattr(defaults, "temperature", None) or 1.0) if draws or is_asked else 0.0
    limit = sampling.max_tokens or getattr(defaults, "max_new_tokens", None) or room
    return replace(
        sampling,
        max_tokens=min(limit, room),
        temperature=temperature,
        top_k=getattr(defaults, "top_k", None) if top_k is None and draws else top_k,
        top_p=getattr(defaults, "top_p", None) if top_p is None and draws else top_p,
        repetition_penalty=sampling.repetition_penalty
        or getattr(defaults, "repetition_penalty", None)
        or 1.0,
    )
