"""A program in place of the monitor process, which answers each call with what it has received."""

from __future__ import annotations

import json
import sys
from typing import Any

from tsx_runtime.features.monitor.messages import (
    FRAME,
    decode_samples,
    encode_frame,
    header_pattern,
)

heads: list[dict[str, Any]] = []
source, target = sys.stdin.buffer, sys.stdout.buffer


def write(head: dict[str, Any], body: bytes = b"") -> None:
    target.write(encode_frame(head, body))
    target.flush()


write({"kind": "ready", "problem": None})
while start := source.read(FRAME.size):
    head_size, size = FRAME.unpack(start)
    head, body = json.loads(source.read(head_size)), source.read(size)
    if head["kind"] == "samples":
        headers = header_pattern(["header:x-own"])
        for sample in decode_samples(head["model"], head["version"], body, headers):
            bodies = {"body": sample.body.decode("latin-1"), "answer": sample.answer.decode()}
            heads.append({"kind": "sample", **sample._asdict(), **bodies})
    elif head["kind"] != "call":
        heads.append({**head, "body": body.decode("latin-1")})
    elif head["operation"] == "raise":
        raise ValueError("a bug")
    elif head["operation"] != "ignore":
        result = {"heads": heads, "arguments": head["arguments"], "body": body.decode("latin-1")}
        if head["operation"] == "clear":
            heads.clear()
        write({"kind": "result", "id": head["id"], "status": 200}, json.dumps(result).encode())
print("the store is closed", file=sys.stderr)
