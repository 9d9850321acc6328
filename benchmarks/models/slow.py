"""A model that sleeps the same time for a batch of any size, like a GPU.

Therefore its capacity is known. With BENCHMARK_REQUEST_SECONDS, each request adds to the time.
"""

import os
import time

BATCH_S = float(os.environ.get("BENCHMARK_BATCH_SECONDS", "0.020"))
REQUEST_S = float(os.environ.get("BENCHMARK_REQUEST_SECONDS", "0"))


def start():
    pass


def answers(bodies):
    time.sleep(BATCH_S + REQUEST_S * len(bodies))
    return ["OK"] * len(bodies)


def handle(data, context):
    return None if data is None else answers(data)
