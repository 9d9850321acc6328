"""`ts.torch_handler.request_envelope.kserve`."""

from tsx_runtime.worker.codecs.envelopes import KServeEnvelope

__all__ = ["KServeEnvelope"]
