"""The archives that both servers load; no handler imports torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

ECHO = """
import json

HEADERS = ("content-type", "x-test", "url_path", "explain", "describe", "accept")

def told(value):
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).decode("latin-1")}
    return {type(value).__name__: value}

def header(context, idx, name):
    headers = context.get_all_request_header(idx)
    return next((value for key, value in headers.items() if key.lower() == name and isinstance(value, str)), None)

def handle(data, context):
    if data is None:
        return None
    return [
        json.dumps({
            "inputs": {name: told(value) for name, value in sorted(row.items())},
            "headers": {name: header(context, idx, name) for name in HEADERS},
        }, sort_keys=True)
        for idx, row in enumerate(data)
    ]
"""

ACTOR = """
import sys
from ts.utils.util import PredictionException

class Actor:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        answers = []
        for idx, row in enumerate(data):
            word = row.get("body", row.get("data"))
            word = bytes(word).decode() if isinstance(word, (bytes, bytearray)) else str(word)
            act, _, rest = word.partition(" ")
            if act == "few":
                return []
            if act == "many":
                return ["a", "b"]
            if act == "nolist":
                return "text"
            answers.append(getattr(self, act)(context, idx, rest))
        return answers

    def text(self, context, idx, rest):
        return rest

    def raw(self, context, idx, rest):
        return b"\\x00\\x01\\xff"

    def array(self, context, idx, rest):
        return bytearray(b"an array")

    def none(self, context, idx, rest):
        return None

    def number(self, context, idx, rest):
        return 17

    def fraction(self, context, idx, rest):
        return 0.1

    def truth(self, context, idx, rest):
        return True

    def rows(self, context, idx, rest):
        return [1, 2.5, "three", None, [4, [5]]]

    def table(self, context, idx, rest):
        return {"a": 1, "b": {"c": [1, 2]}, "d": "\\u00e9\\u4e2d"}

    def empty(self, context, idx, rest):
        return ""

    def unsupported(self, context, idx, rest):
        return object()

    def status(self, context, idx, rest):
        context.set_response_status(int(rest), "said", idx)
        return "with a status"

    def header(self, context, idx, rest):
        name, _, value = rest.partition("=")
        context.set_response_header(idx, name, value)
        return "with a header"

    def kind(self, context, idx, rest):
        context.set_response_content_type(idx, rest)
        return "with a type"

    def fail(self, context, idx, rest):
        raise ValueError(rest)

    def refuse(self, context, idx, rest):
        code, _, message = rest.partition(" ")
        raise PredictionException(message, int(code))

    def memory(self, context, idx, rest):
        raise MemoryError("none left")

    def cuda(self, context, idx, rest):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def named(self, context, idx, rest):
        return str(context.get_request_header(idx, rest))

    def facts(self, context, idx, rest):
        return {
            "model": context.model_name,
            "manifest": {key: context.manifest["model"].get(key) for key in ("modelName", "modelVersion", "handler")},
            "batch_size": context.system_properties["batch_size"],
            "gpu_id": context.system_properties["gpu_id"],
            "server_name": context.system_properties["server_name"],
            "limit": context.system_properties["limit_max_image_pixels"],
            "config": context.model_yaml_config,
            "ids": [len(value) for value in context.request_ids.values()],
        }
"""

DESCRIBED = """
def handle(data, context):
    if data is None:
        return None
    if context.get_request_header(0, "describe") == "True":
        return [{"inputs": "any", "answers": 1}]
    return ["served" for _ in data]
"""

BROKEN = """
def handle(data, context):
    if data is None:
        raise RuntimeError("the weights are not there")
    return ["never"]
"""

OUT_OF_MEMORY = """
class Full:
    def initialize(self, context):
        raise MemoryError("there is no room")

    def handle(self, data, context):
        return ["never"]
"""

# TorchServe's workers import torch only to recognize tensors; this stub is faster to import.
TORCH_STUB = "class Tensor:\n    pass\n"

MODELS = {
    "echo": (ECHO, "1.0", ""),
    "actor": (ACTOR, "1.0", "minWorkers: 1\nmaxWorkers: 1\nown:\n  key: [1, two]\n"),
    "described": (DESCRIBED, "1.0", ""),
}
UNLOADED_MODELS = {
    "other": (DESCRIBED, "1.0", ""),
    "other-2": (DESCRIBED, "2.0", ""),
    "decided": (DESCRIBED, "1.0", "minWorkers: 1\nmaxWorkers: 2\n"),
    "full": (OUT_OF_MEMORY, "1.0", "maxRetryTimeoutInSec: 1\n"),
    "broken": (BROKEN, "1.0", "maxRetryTimeoutInSec: 1\n"),
}


def write_store(store: Path) -> None:
    store.mkdir()
    for name, (handler, version, config) in {**MODELS, **UNLOADED_MODELS}.items():
        model = {
            "modelName": name.removesuffix("-2"),
            "modelVersion": version,
            "handler": "handler.py",
        }
        files = {"handler.py": handler}
        if config:
            model["configFile"], files["model-config.yaml"] = "model-config.yaml", config
        files["MAR-INF/MANIFEST.json"] = json.dumps(
            {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
        )
        with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
            for member, text in files.items():
                archive.writestr(member, text)
    (store.parent / "torch.py").write_text(TORCH_STUB)
    (store / "junk.mar").write_bytes(b"this is no archive")
