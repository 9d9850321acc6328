"""A Hugging Face model as users serve it without tsx.

Usage: `python huggingface_peer.py FastAPI|LitServe DIRECTORY TASK PORT PROCESSES`.
"""

import os
import socket
import sys

import torch

server, directory, task, port, processes = sys.argv[1:]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load():
    """Return a function from texts to answers."""
    torch.set_num_threads(max(1, os.cpu_count() // int(processes)))
    if task == "sentence-similarity":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(directory, device=DEVICE)
        return lambda texts: model.encode(texts, batch_size=16, show_progress_bar=False).tolist()
    from transformers import pipeline

    classify = pipeline(task, model=directory, device=DEVICE, truncation=True, top_k=None)
    return lambda texts: classify(texts, batch_size=16)


def serve_fastapi():
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

    class Request(BaseModel):
        inputs: str

    listening = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    for _ in range(int(processes) - 1):
        if not os.fork():
            break
    app, answer = FastAPI(), load()

    @app.post("/predict")
    def predict(request: Request) -> JSONResponse:
        return JSONResponse(answer([request.inputs])[0])

    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


# LitServe's worker processes import this module again.
if server == "LitServe":
    import litserve

    class Model(litserve.LitAPI):
        def setup(self, device):
            self.answer = load()

        def decode_request(self, request):
            return request["inputs"]

        def predict(self, inputs):
            return self.answer(inputs)

        def encode_response(self, output):
            return output


def serve_litserve():
    served = litserve.LitServer(
        Model(max_batch_size=16, batch_timeout=0.005),
        accelerator=DEVICE,
        workers_per_device=int(processes),
    )
    served.run(
        host="127.0.0.1",
        port=int(port),
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
    )


if __name__ == "__main__":
    serve_fastapi() if server == "FastAPI" else serve_litserve()
