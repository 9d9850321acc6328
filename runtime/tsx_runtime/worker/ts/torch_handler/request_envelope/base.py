"""`ts.torch_handler.request_envelope.base`."""

from tsx_runtime.worker.codecs.envelopes import BaseEnvelope

__all__ = ["BaseEnvelope"]
