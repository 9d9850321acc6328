"""The import of a handler by its name, as in TorchServe.

1. `file.py[:function]` or `file[:function]` is imported from the model's directory (`modules.py`).
   If there is no such file, an installed module or a built-in handler with that name is used.
2. If the module has the function (by default `handle`), the function answers requests. It is
   called once with `(None, context)` to load the model.
3. Otherwise the module's only class is instantiated. Its `initialize(context)` loads the model,
   and its `handle` answers requests.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tsx_archiver import handler_fault, is_inside, shown
from tsx_runtime import features
from tsx_runtime.worker.exceptions import LoadError, describe_error
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.modules import own_modules

logger = logging.getLogger("tsx.worker")


class BuiltinHandler(NamedTuple):
    """A handler that comes with tsx.

    Attributes:
        path: Its class, as `module:Class`.
        check: A function that raises LoadError if the handler must not load the model.
    """

    path: str
    check: Callable[[Context], None] | None = None


_BUILTIN = {
    "base_handler": BuiltinHandler("tsx_runtime.worker.handlers.base:BaseHandler"),
    "image_classifier": BuiltinHandler(
        "tsx_runtime.worker.handlers.image_classifier:ImageClassifier"
    ),
    "image_segmenter": BuiltinHandler("tsx_runtime.worker.handlers.image_segmenter:ImageSegmenter"),
    "object_detector": BuiltinHandler("tsx_runtime.worker.handlers.object_detector:ObjectDetector"),
    "text_classifier": BuiltinHandler("tsx_runtime.worker.handlers.text_classifier:TextClassifier"),
}
# The handler for archives of the C++ backend.
CPP_HANDLERS = {
    "torchscript_handler": BuiltinHandler(
        "tsx_runtime.worker.handlers.torchscript:TorchScriptHandler"
    )
}
# The handler for models without an archive.
LAYOUT_HANDLERS = {
    "sagemaker_toolkit": BuiltinHandler(
        "tsx_runtime.worker.handlers.sagemaker.toolkit:ToolkitHandler"
    )
}
_OWN_HANDLERS = _BUILTIN | CPP_HANDLERS | LAYOUT_HANDLERS
DEFAULT_HANDLER = "base_handler"
# For TorchServe's built-in handlers that tsx does not have: what to do instead.
REPLACEMENT_ADVICE = {
    "vllm_handler": (
        "serve the model with `tsx serve DIRECTORY`; `huggingface: {engine: vllm}` in"
        " model-config.yaml has vLLM run it."
    ),
    "dali_image_classifier": (
        "derive from `ImageClassifier`, and run the DALI pipeline in `preprocess`."
    ),
    "trt_llm_handler": (
        "a language model compiled by TensorRT-LLM is served best by `trtllm-serve`, which has the"
        " same OpenAI routes."
    ),
}

_FIRST_CALL_ADVICE = (
    ". The first call of a handler function has data=None, to initialise it: let the function begin"
    " with `if data is None: return None`"
)


@cache
def builtin_handlers() -> dict[str, BuiltinHandler]:
    """Return the built-in handlers; those of features are in their `handlers.py`."""
    handlers = dict(_BUILTIN)
    for module in features.modules("handlers"):
        handlers |= module.HANDLERS
    return dict(sorted(handlers.items()))


class LoadedHandler(NamedTuple):
    """A handler that has loaded its model.

    Attributes:
        call: The function `call(data, context)` that answers a batch.
        name: The name of the handler.
        instance: The object of a handler class, or None for a function.
    """

    call: Callable[[Any, Context], Any]
    name: str
    instance: Any


class Coroutines:
    """The event loop on which a worker runs the coroutines of its handler."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, result: Any) -> Any:
        """Run a coroutine and return its result; return any other value itself."""
        # The first check is true in most cases, and ten times faster than the second one.
        if type(result) is list or not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(result)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            asyncio.set_event_loop(None)
            self._loop = None


def load_entry(
    handler: str, model_dir: Path, context: Context, coroutines: Coroutines
) -> LoadedHandler:
    """Import a handler and let it load the model.

    Raises:
        LoadError: The handler cannot be used. The cause is the exception of its code, if any.
    """
    fault = handler_fault(handler) if handler else None
    if fault:  # Not every front end has checked the name.
        raise LoadError(f"The handler {shown(handler)} is refused: {fault}.")
    return _load(handler.strip(" ") or DEFAULT_HANDLER, model_dir, context, coroutines)


def _load(handler: str, model_dir: Path, context: Context, coroutines: Coroutines) -> LoadedHandler:
    entry, name = find_entry(handler, model_dir, context)
    if inspect.isclass(entry):
        return _load_class(entry, name, context, coroutines)
    _check_parameters(
        entry, f"Function {getattr(entry, '__name__', name)} of handler {name}", "data, context"
    )
    _call_user_code(
        name, lambda: coroutines.finish(entry(None, context)), none_advice=_FIRST_CALL_ADVICE
    )
    return LoadedHandler(entry, name, None)


def find_entry(
    handler: str, model_dir: Path, context: Context | None = None
) -> tuple[Callable[..., Any], str]:
    """Import a handler, and return its function or class and its name for messages.

    With the context of a model, a built-in handler checks the model before it is imported.

    Raises:
        LoadError: There is no such handler, it refuses the model, or its module cannot be imported.
    """
    module_name, _, function_name = handler.partition(":")
    path = find_file(module_name, model_dir)
    # A module that parses sys.argv must not get the server's arguments.
    sys.argv[:] = [str(path or module_name)]
    builtin = module_name.removeprefix("ts.torch_handler.").removesuffix(".py")
    if path is not None:
        module = import_file(path)
    elif module_name.startswith("ts.") and builtin in builtin_handlers():
        return _import_builtin(builtin_handlers()[builtin], context), builtin
    elif (installed := _find_installed_module(module_name)) is not None:
        module = _run_import(f"Handler {installed}", lambda: importlib.import_module(installed))
    elif own_handler := _OWN_HANDLERS.get(builtin) or builtin_handlers().get(builtin):
        return _import_builtin(own_handler, context), builtin
    elif builtin in REPLACEMENT_ADVICE:
        raise LoadError(
            f"tsx does not include TorchServe's {builtin}: {REPLACEMENT_ADVICE[builtin]}"
        )
    else:
        files = ", ".join(sorted(path.name for path in model_dir.glob("*.py"))) or "no Python file"
        raise LoadError(
            f"Handler {handler!r} was not found: the archive has {files}, and the built-in handlers"
            f" are {', '.join(builtin_handlers())}."
        )
    return _find_entry_in(module, function_name, handler), handler


def find_file(name: str, model_dir: Path) -> Path | None:
    """Return the file of a handler: the given path, or a file of this name at the top level."""
    relative = name.replace("\\", "/")
    if not relative.endswith(".py"):
        relative += ".py"
    for candidate in (model_dir / relative, model_dir / relative.rpartition("/")[2]):
        if candidate.is_file():
            return own_file(candidate, model_dir)
    return None


def own_file(path: Path, model_dir: Path) -> Path:
    """Return a path, after checking that it is inside the model's directory.

    Raises:
        LoadError: The path leads out of the model's directory.
    """
    if not is_inside(path, model_dir):
        name = shown(os.path.relpath(path, model_dir))
        raise LoadError(
            f"{name} is refused: it leads out of the model's directory. Put the file itself into"
            " the archive."
        )
    return path


def import_file(path: Path, role: str = "Handler") -> ModuleType:
    """Import a file of the archive, even if an installed module has the same name.

    Args:
        path: The path of the file.
        role: The role of the file, for messages.

    Raises:
        LoadError: The file cannot be imported.
    """
    if path.suffix != ".py":
        raise LoadError(f"{path.name} is not a Python file.")
    return own_modules.import_file(
        path, lambda module, execute: _run_import(f"{role} {path.name}", execute)
    )


def classes_of(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes that a module defines; with `parent_class`, only its subclasses."""
    defined = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
        # Classes of the package `ts` are defined in other modules; see ts_shim.py.
        or module.__name__.startswith("ts.")
    ]
    return [
        member
        for member in defined
        if parent_class is None or (issubclass(member, parent_class) and member is not parent_class)
    ]


def _find_installed_module(name: str) -> str | None:
    module_name = name.removesuffix(".py").replace("\\", "/").rpartition("/")[2]
    if not all(part.isidentifier() for part in module_name.split(".")):
        return None
    try:
        return module_name if importlib.util.find_spec(module_name) is not None else None
    # The parent package cannot be imported, or the name is `__main__`.
    except (ImportError, ValueError):
        return None


def _run_import(description: str, import_module: Callable[[], Any]) -> Any:
    try:
        return import_module()
    except SyntaxError as error:
        location = (
            f"{Path(error.filename).name}, line {error.lineno}" if error.filename else description
        )
        raise LoadError(
            f"{description} does not import: {location} is not valid Python: {error.msg}."
        ) from error
    except ModuleNotFoundError as error:
        raise LoadError(f"{description} does not import: {error}{_advice(error)}") from error
    except (Exception, SystemExit) as error:  # the boundary to a user's code
        raise LoadError(
            f"{description} does not import: {describe_error(error)}{_advice(error)}"
        ) from error


def _import_builtin(handler: BuiltinHandler, context: Context | None) -> type:
    if context is not None and handler.check is not None:
        handler.check(context)
    module, _, attribute = handler.path.partition(":")
    kind: type = getattr(importlib.import_module(module), attribute)
    return kind


def _find_entry_in(module: ModuleType, function_name: str, handler: str) -> Callable[..., Any]:
    entry: Callable[..., Any] | None = getattr(module, function_name or "handle", None)
    if callable(entry):
        return entry
    classes = classes_of(module)
    if len(classes) > 1:  # Helper classes are not candidates.
        handlers = [
            kind
            for kind in classes
            if callable(getattr(kind, "handle", None))
            and callable(getattr(kind, "initialize", None))
        ]
        classes = handlers if len(handlers) == 1 else classes
    if function_name and classes:
        logger.warning(
            "%s has no function %r, so its class %s is used",
            handler,
            function_name,
            classes[0].__name__,
        )
    if not classes:
        raise LoadError(
            f"Handler {handler} has neither a function {function_name or 'handle'}(data, context)"
            " nor a class. Define one of them in it."
        )
    if len(classes) > 1:
        names = ", ".join(member.__name__ for member in classes)
        raise LoadError(
            f"Handler {handler} defines {len(classes)} classes ({names}), so the handler class is"
            " ambiguous. Keep one class in it and move the others to a module that it imports, or"
            " define a function handle(data, context)."
        )
    return classes[0]


def _load_class(
    kind: type, handler: str, context: Context, coroutines: Coroutines
) -> LoadedHandler:
    instance: Any = _call_user_code(handler, kind)
    for method, arguments in (("handle", "data, context"), ("initialize", "context")):
        # The instance is checked, not the class, to allow `self.handle = MicroBatching(self)`.
        if not callable(getattr(instance, method, None)):
            raise LoadError(
                f"Class {kind.__name__} of handler {handler} has no method {method}. Add `def"
                f" {method}(self, {arguments})`, or derive it from"
                " ts.torch_handler.base_handler.BaseHandler."
            )
        _check_parameters(
            getattr(instance, method), f"{kind.__name__}.{method} of handler {handler}", arguments
        )
    _call_user_code(handler, lambda: coroutines.finish(instance.initialize(context)))
    return LoadedHandler(instance.handle, handler, instance)


def _check_parameters(call: Callable[..., Any], description: str, arguments: str) -> None:
    """Check while loading that a function accepts the arguments of later calls.

    Raises:
        LoadError: The function does not accept them.
    """
    try:
        inspect.signature(call).bind(*arguments.split(", "))
    except TypeError as error:
        raise LoadError(
            f"{description} is called with ({arguments}), which it does not take: {error}. Give it"
            " these parameters."
        ) from None
    except ValueError:  # Python may not know the parameters of a function in C.
        pass


def _call_user_code(handler: str, function: Callable[[], Any], none_advice: str = "") -> Any:
    """Run a user's code, and return its result.

    Args:
        handler: The name of the handler.
        function: The function that runs the code.
        none_advice: The advice for an error about a None.

    Raises:
        LoadError: The code raised an exception.
    """
    try:
        return function()
    except LoadError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the boundary to a user's code
        advice = none_advice if "NoneType" in str(error) else _advice(error)
        raise LoadError(
            f"Handler {handler} could not load the model: {describe_error(error)}{advice}"
        ) from error


def _advice(error: BaseException) -> str:
    """Return advice if the error is about a module or a file that the archive lacks.

    Relative paths start at the model's directory, which is the working directory of a worker.
    """
    if isinstance(error, ModuleNotFoundError):
        return (
            ". Install that module where tsx runs, or put its file into the archive with"
            " --extra-files."
        )
    root = own_modules.root
    if (
        root is None
        or not isinstance(error, FileNotFoundError)
        or not isinstance(error.filename, str | bytes)
    ):
        return ""
    path = root / os.fsdecode(error.filename)
    if not path.is_relative_to(root) or path.exists():
        return ""
    return (
        f". The archive does not contain {shown(str(path.relative_to(root)))}: add it with"
        " --extra-files when packing"
    )
