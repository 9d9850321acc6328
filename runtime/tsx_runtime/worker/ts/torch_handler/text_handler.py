"""`ts.torch_handler.text_handler`."""

from tsx_runtime.worker.handlers.steps.text_cleaning import CLEANUP_REGEX
from tsx_runtime.worker.handlers.text import TextHandler

__all__ = ["CLEANUP_REGEX", "TextHandler"]
