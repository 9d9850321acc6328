"""The rate of a model's handler without a server: batches of 64 in a plain loop.

    python bare.py MODEL BODY SECONDS

The program prints a JSON object with the handler's answer to BODY and its requests/s. If the file
BODY is missing, the program writes the model's sample into it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

BATCH = 64


def main(file: Path, body: Path, seconds: float) -> None:
    sys.path.insert(0, str(file.parent))
    model = importlib.import_module(file.stem)
    if not body.exists():
        body.write_bytes(model.sample())
    model.handle(None, None)
    batch = [{"body": bytearray(body.read_bytes())} for _ in range(BATCH)]
    answer = model.handle(batch, None)[0]
    requests, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        model.handle(batch, None)
        requests += BATCH
    print(json.dumps({"answer": answer, "rate": requests / elapsed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
