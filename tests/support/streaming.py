"""A model that streams words like text generation, in the events of OpenAI and Hugging Face."""

from __future__ import annotations

CONFIG = "asyncCommunication: true\nminWorkers: 1\nmaxWorkers: 1\n"

# A handler that repeats the prompt's words, at most `max_tokens`. A prompt with `slow` pauses
# between them; one with `break` fails after two.
TALKER = """
import asyncio, json, time
from ts.metrics.dimension import Dimension

class Talker:
    input_kind = "chat"

    async def initialize(self, context):
        self.running = 0
        self.cancelled = 0
        self.context = context

    def report(self, name, value, kind):
        labels = [Dimension("adapter", "")] + ([Dimension("worker", "9000")] if kind == "gauge" else [])
        self.context.metrics.add_metric("tsx_generation_" + name, value, "", None, labels, kind)

    async def handle(self, data, context):
        body = data[0].get("body") or data[0].get("data")
        body = body if isinstance(body, dict) else json.loads(bytes(body))
        path = context.get_request_header(0, "url_path") or ""
        if body.get("inputs") == "cancelled":
            return [{"cancelled": self.cancelled}]
        if "messages" in body:
            text = body["messages"][-1]["content"]
        else:
            text = body.get("prompt", body.get("inputs"))
        own = body.get("parameters", {})
        most = body.get("max_tokens", own.get("max_new_tokens", 16))
        if most > 1000:
            context.set_response_status(400, "", 0)
            return [{"error": {"message": "max_tokens is more than the context has", "type": "invalid_request_error"}}]
        words = (text.split() * (1 + most // max(1, len(text.split()))))[:most]
        context.set_response_content_type(0, "text/event-stream")
        began = time.monotonic()
        self.running += 1
        self.report("running_sequences", self.running, "gauge")
        self.report("waiting_sequences", 0, "gauge")
        self.report("cache_use_ratio", min(1.0, self.running / 8), "gauge")
        try:
            if "chat" in path:
                self.send(context, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            for number, word in enumerate(words):
                await asyncio.sleep(0.25 if "slow" in text else 0.005)
                if "break" in text and number == 2:
                    self.send(context, {"error": {"message": "the engine ended", "type": "server_error"}})
                    return [""]
                if number == 0:
                    self.report("time_to_first_token_seconds", time.monotonic() - began, "histogram")
                self.send(context, self.event(path, number, word))
            usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(words)}
            if path:
                self.send(context, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
                self.send(context, {"choices": [], "usage": usage})
                context.send_piece(0, b"data: [DONE]\\n\\n")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.report("running_sequences", self.running, "gauge")
            self.report("prompt_tokens_total", len(text.split()), "counter")
            self.report("tokens_total", len(words), "counter")
            self.report("time_per_output_token_seconds", (time.monotonic() - began) / max(1, len(words)), "histogram")
        return [""]

    def event(self, path, number, word):
        if "chat" in path:
            return {"choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]}
        if path:
            return {"choices": [{"index": 0, "text": word + " ", "finish_reason": None}]}
        return {"index": number, "token": {"id": number, "text": word + " ", "special": False}, "generated_text": None}

    def send(self, context, value):
        context.send_piece(0, b"data: " + json.dumps(value).encode() + b"\\n\\n")
"""
