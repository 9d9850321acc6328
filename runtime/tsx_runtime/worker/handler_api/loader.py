"""Finds the entry point of a handler by its name, by TorchServe's rules. Contract section 5.1.

1. `file.py[:function]` or `file[:function]` is imported from the model's directory (`modules.py`);
   a name that is not found there is a module that is installed, or one of the built-in handlers.
2. A module that has the function (by default `handle`) is served by it; it is called once with
   `(None, context)` to load.
3. Otherwise the module's only class is made, `initialize(context)` is called, and `handle` serves.
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
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tsx_archiver import handler_fault, is_inside, shown
from tsx_runtime.worker.exceptions import LoadError, in_words
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.modules import own_modules

logger = logging.getLogger("tsx.worker")

BUILTIN = {
    "base_handler": "tsx_runtime.worker.handlers.base:BaseHandler",
    "huggingface": "tsx_runtime.worker.handlers.huggingface.handler:HuggingFaceHandler",
    "huggingface_generation": (
        "tsx_runtime.worker.handlers.huggingface.generation:HuggingFaceGeneration"
    ),
    "image_classifier": "tsx_runtime.worker.handlers.image_classifier:ImageClassifier",
    "image_segmenter": "tsx_runtime.worker.handlers.image_segmenter:ImageSegmenter",
    "mlflow_pyfunc": "tsx_runtime.worker.handlers.mlflow.pyfunc:MLflowPyfunc",
    "mlflow_pytorch": "tsx_runtime.worker.handlers.mlflow.pytorch:MLflowPyTorch",
    "object_detector": "tsx_runtime.worker.handlers.object_detector:ObjectDetector",
    "text_classifier": "tsx_runtime.worker.handlers.text_classifier:TextClassifier",
}
CPP = {
    "torchscript_handler": "tsx_runtime.worker.handlers.torchscript:TorchScriptHandler"
}  # what archives of the C++ backend get
LAYOUTS = {
    "sagemaker_toolkit": "tsx_runtime.worker.handlers.sagemaker.toolkit:ToolkitHandler"
}  # of models that have no archive
DEFAULT_HANDLER = "base_handler"
ELSEWHERE = {  # TorchServe's other built-in handlers: what to do instead
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


_FIRST_CALL = (
    ". The first call of a handler function has data=None, to initialise it: let the function begin"
    " with `if data is None: return None`"
)


class LoadedHandler(NamedTuple):
    """`call(data, context)` answers a batch; `instance` is the handler's object where it is a
    class.
    """

    call: Callable[[Any, Context], Any]
    name: str
    instance: Any


class Coroutines:
    """Runs what async handlers return, on one event loop kept for the worker."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, result: Any) -> Any:
        if type(result) is list or not inspect.isawaitable(
            result
        ):  # the first check nearly always holds, and is ten times as fast
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
    """Import and initialise.

    Raises `LoadError`, with the handler's own exception as its cause where it raised one.
    """
    fault = handler_fault(handler) if handler else None
    if fault:  # also where the front end has not checked
        raise LoadError(f"The handler {shown(handler)} is refused: {fault}.")
    return _load(handler.strip(" ") or DEFAULT_HANDLER, model_dir, context, coroutines)


def _load(handler: str, model_dir: Path, context: Context, coroutines: Coroutines) -> LoadedHandler:
    entry, name = find_entry(handler, model_dir)
    if inspect.isclass(entry):
        return _from_class(entry, name, context, coroutines)
    _check_parameters(
        entry, f"Function {getattr(entry, '__name__', name)} of handler {name}", "data, context"
    )
    _initialised(name, lambda: coroutines.finish(entry(None, context)), if_none=_FIRST_CALL)
    return LoadedHandler(entry, name, None)


def find_entry(handler: str, model_dir: Path) -> tuple[Callable[..., Any], str]:
    """The function or class, imported but not called, and its name for texts. Raises
    `LoadError`.
    """
    module_name, _, function_name = handler.partition(":")
    path = find_file(module_name, model_dir)
    sys.argv[:] = [
        str(path or module_name)
    ]  # A module that parses it must not get the server's command line.
    builtin = module_name.removeprefix("ts.torch_handler.").removesuffix(".py")
    if path is not None:
        module = import_file(path)
    elif builtin in BUILTIN and module_name.startswith("ts."):
        return _builtin(builtin), builtin
    elif (installed := _find_installed(module_name)) is not None:
        module = _imported(f"Handler {installed}", lambda: importlib.import_module(installed))
    elif builtin in BUILTIN | CPP | LAYOUTS:
        return _builtin(builtin), builtin
    elif builtin in ELSEWHERE:
        raise LoadError(f"tsx does not include TorchServe's {builtin}: {ELSEWHERE[builtin]}")
    else:
        files = ", ".join(sorted(path.name for path in model_dir.glob("*.py"))) or "no Python file"
        raise LoadError(
            f"Handler {handler!r} was not found: the archive has {files}, and the built-in handlers"
            f" are {', '.join(BUILTIN)}."
        )
    return _entry_of(module, function_name, handler), handler


def find_file(name: str, model_dir: Path) -> Path | None:
    """The handler's file: as the path says, else by its last part, as archives hold it flat."""
    relative = name.replace("\\", "/")
    if not relative.endswith(".py"):
        relative += ".py"
    for candidate in (model_dir / relative, model_dir / relative.rpartition("/")[2]):
        if candidate.is_file():
            return own_file(candidate, model_dir)
    return None


def own_file(path: Path, model_dir: Path) -> Path:
    """The path of code, or of a file whose content may be quoted.

    Raises LoadError where it leads out of the model's directory.
    """
    if not is_inside(path, model_dir):
        name = shown(os.path.relpath(path, model_dir))
        raise LoadError(
            f"{name} is refused: it leads out of the model's directory. Put the file itself into"
            " the archive."
        )
    return path


def import_file(path: Path, what: str = "Handler") -> ModuleType:
    """Import a file of the archive, also where an installed module has the same name."""
    if path.suffix != ".py":
        raise LoadError(f"{path.name} is not a Python file.")
    return own_modules.import_file(
        path, lambda module, execute: _imported(f"{what} {path.name}", execute)
    )


def classes_of(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that are defined in the module itself; with `parent_class`, those derived from
    it.
    """
    own = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
        or module.__name__.startswith("ts.")  # whose classes stand elsewhere: ts_shim.py
    ]
    return [
        member
        for member in own
        if parent_class is None or (issubclass(member, parent_class) and member is not parent_class)
    ]


def _find_installed(name: str) -> str | None:
    dotted = name.removesuffix(".py").replace("\\", "/").rpartition("/")[2]
    if not all(part.isidentifier() for part in dotted.split(".")):
        return None
    try:
        return dotted if importlib.util.find_spec(dotted) is not None else None
    except (ImportError, ValueError):  # a parent that does not import, or __main__
        return None


def _imported(named: str, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except SyntaxError as error:
        where = f"{Path(error.filename).name}, line {error.lineno}" if error.filename else named
        raise LoadError(
            f"{named} does not import: {where} is not valid Python: {error.msg}."
        ) from error
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{named} does not import: {error}. Install that module where tsx runs, or put its file"
            " into the archive with --extra-files."
        ) from error
    except (Exception, SystemExit) as error:  # the boundary to a user's code
        raise LoadError(
            f"{named} does not import: {in_words(error)}{_missing_file(error)}"
        ) from error


def _builtin(name: str) -> type:
    module, _, attribute = (BUILTIN | CPP | LAYOUTS)[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def _entry_of(module: ModuleType, function_name: str, handler: str) -> Callable[..., Any]:
    entry: Callable[..., Any] | None = getattr(module, function_name or "handle", None)
    if callable(entry):
        return entry
    classes = classes_of(module)
    if len(classes) > 1:  # helper classes do not count
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


def _from_class(
    kind: type, handler: str, context: Context, coroutines: Coroutines
) -> LoadedHandler:
    instance: Any = _initialised(handler, kind)
    for method, arguments in (("handle", "data, context"), ("initialize", "context")):
        # not of the class: `self.handle = MicroBatching(self)` is one, too
        if not callable(getattr(instance, method, None)):
            raise LoadError(
                f"Class {kind.__name__} of handler {handler} has no method {method}. Add `def"
                f" {method}(self, {arguments})`, or derive it from"
                " ts.torch_handler.base_handler.BaseHandler."
            )
        _check_parameters(
            getattr(instance, method), f"{kind.__name__}.{method} of handler {handler}", arguments
        )
    _initialised(handler, lambda: coroutines.finish(instance.initialize(context)))
    return LoadedHandler(instance.handle, handler, instance)


def _check_parameters(call: Callable[..., Any], named: str, arguments: str) -> None:
    """Refuse at load what every request would fail on: an entry that does not take what it is
    called with.
    """
    try:
        inspect.signature(call).bind(*arguments.split(", "))
    except TypeError as error:
        raise LoadError(
            f"{named} is called with ({arguments}), which it does not take: {error}. Give it these"
            " parameters."
        ) from None
    except ValueError:  # a function in C need not tell its parameters
        pass


def _initialised(handler: str, act: Callable[[], Any], if_none: str = "") -> Any:
    """Run a user's code; `if_none` ends the message of an error about a None. Raises LoadError."""
    try:
        return act()
    except LoadError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the boundary to a user's code
        advice = if_none if "NoneType" in str(error) else _missing_file(error)
        raise LoadError(
            f"Handler {handler} could not load the model: {in_words(error)}{advice}"
        ) from error


def _missing_file(error: BaseException) -> str:
    """What to do about a file of the archive that is not there.

    Relative paths are those of the model's directory, where a worker is.
    """
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
