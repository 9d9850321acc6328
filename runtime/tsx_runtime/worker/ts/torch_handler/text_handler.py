"""`ts.torch_handler.text_handler`."""

from tsx_runtime.worker.handlers.text import TextHandler
from tsx_runtime.worker.handlers.text_cleaning import CLEANUP_REGEX

__all__ = ["CLEANUP_REGEX", "TextHandler"]
