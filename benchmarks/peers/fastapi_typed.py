"""A FastAPI application of the typed model in BENCHMARK_MODEL, for uvicorn."""

import importlib
import os
import sys
from pathlib import Path

from fastapi import FastAPI

MODEL = Path(os.environ["BENCHMARK_MODEL"])
sys.path.insert(0, str(MODEL.parent))
types = importlib.import_module(MODEL.stem)
model = types.Sentiment()
model.load("cpu")
app = FastAPI()


# A function that is not asynchronous would run in a thread, which takes longer.
@app.post("/predict")
async def predict(item: types.Text) -> types.Label:
    return model.predict([item])[0]
