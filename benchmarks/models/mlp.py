"""Three layers on 784 floats in raw float32, on one thread.

With one thread, the model has the same resources in every server.
"""

import numpy as np
import torch

model = None


def start():
    global model
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(784, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    ]
    model = torch.nn.Sequential(*layers).eval()


def sample():
    return np.random.default_rng(0).random(784, dtype=np.float32).tobytes()


def answers(bodies):
    rows = torch.frombuffer(bytearray().join(bodies), dtype=torch.float32).view(len(bodies), 784)
    with torch.inference_mode():
        return model(rows).softmax(1).tolist()


def handle(data, context):
    if data is None:
        return start()
    return answers([row["body"] for row in data])
