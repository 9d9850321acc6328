"""The request loop of SageMaker's PyTorch toolkit, rebuilt from its description.

    python benchmarks/toolkit_loop.py DIRECTORY PORT

One process loads a directory in the toolkit's layout, then calls `transform` for one request at a
time: input_fn, predict_fn and output_fn, of the toolkit or of the user's program. The Java front
end and its socket are left out. tsx's parser and event loop read HTTP, so that only the loops
differ.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httptools
import torch
import uvloop

from tsx_runtime.worker.handlers.sagemaker.formats import JSON, to_body, to_tensor


class Transformer:
    def __init__(self, directory: Path) -> None:
        self._program = program(directory / "code" / "inference.py")
        self._model = self._program.model_fn(str(directory)).eval()

    def transform(self, body: bytes, content_type: str, accept: str) -> tuple[str | bytes, str]:
        tensor = to_tensor(body, content_type)
        with torch.no_grad():
            prediction = self._model(tensor)
        return to_body(prediction, accept, JSON)


def program(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Connection(asyncio.Protocol):
    """A connection that answers its requests one by one, and blocks the process while it does."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._headers: dict[str, str] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body, self._headers = b"", {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, default_type = b"", JSON
        if self._parser.get_method() == b"POST":
            answer, default_type = self._transformer.transform(
                self._body, self._headers["content-type"], self._headers.get("accept", "")
            )
            body = answer if isinstance(answer, bytes) else answer.encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (default_type.encode(), len(body), body)
        )


async def serve(directory: Path, port: int) -> None:
    transformer = Transformer(directory)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(transformer), "127.0.0.1", port
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
