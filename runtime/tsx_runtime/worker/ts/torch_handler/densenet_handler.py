"""`ts.torch_handler.densenet_handler`: TorchServe's first base class, of which archives of its time derive."""

from tsx_runtime.worker.handlers.base import BaseHandler

__all__ = ["DenseNetHandler"]


class DenseNetHandler(BaseHandler):
    """Derived handlers bring their own `preprocess` and `postprocess`."""
