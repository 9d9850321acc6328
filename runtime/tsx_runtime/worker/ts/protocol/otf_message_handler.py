"""`ts.protocol.otf_message_handler`."""

from tsx_runtime.worker.codecs.streaming import send_intermediate_predict_response

__all__ = ["send_intermediate_predict_response"]
