"""`ts.torch_handler.request_envelope.body`."""

from tsx_runtime.worker.envelopes import BodyEnvelope

__all__ = ["BodyEnvelope"]
