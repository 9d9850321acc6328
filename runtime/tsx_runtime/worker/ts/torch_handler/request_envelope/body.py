"""`ts.torch_handler.request_envelope.body`."""

from tsx_runtime.worker.codecs.envelopes import BodyEnvelope

__all__ = ["BodyEnvelope"]
