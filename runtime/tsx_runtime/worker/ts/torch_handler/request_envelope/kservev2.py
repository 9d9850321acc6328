"""`ts.torch_handler.request_envelope.kservev2`."""

from tsx_runtime.worker.codecs.envelopes import KServev2Envelope

__all__ = ["KServev2Envelope"]
