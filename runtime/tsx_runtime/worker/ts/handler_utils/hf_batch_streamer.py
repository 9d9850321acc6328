"""`ts.handler_utils.hf_batch_streamer`."""

from tsx_runtime.worker.codecs.text_streamer import TextIteratorStreamerBatch

__all__ = ["TextIteratorStreamerBatch"]
