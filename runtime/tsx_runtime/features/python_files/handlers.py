"""The handlers of Python files."""

from __future__ import annotations

from tsx_archiver.python_file import HANDLER, LITSERVE
from tsx_runtime.worker.handler_api.loader import BuiltinHandler

HANDLERS = {
    HANDLER: BuiltinHandler("tsx_runtime.features.python_files.worker.handler:PythonFileHandler"),
    LITSERVE: BuiltinHandler("tsx_runtime.features.python_files.worker.litserve:LitServeHandler"),
}
