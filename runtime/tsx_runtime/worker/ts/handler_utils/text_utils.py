"""`ts.handler_utils.text_utils`."""

from tsx_runtime.worker.handlers.steps.text_cleaning import ngrams_iterator

__all__ = ["ngrams_iterator"]
