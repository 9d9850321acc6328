"""`ts.torch_handler.request_envelope.json`."""

from tsx_runtime.worker.codecs.envelopes import JSONEnvelope

__all__ = ["JSONEnvelope"]
