"""A model that sleeps 8 ms per batch plus 1.5 ms per request, and uses no CPU."""

import time

BATCH_S, REQUEST_S = 0.008, 0.0015


def sample():
    return b"x" * 1000


def handle(data, context):
    if data is None:
        return None
    time.sleep(BATCH_S + REQUEST_S * len(data))
    return ["OK"] * len(data)
