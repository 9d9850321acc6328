"""The models in a Python file."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tsx_archiver import ModelConfig, default_model_name, split_handler
from tsx_archiver.metadata.keys import keys_of
from tsx_archiver.python_file import BATCH, METHOD
from tsx_cli.archive.python_files.code import parse
from tsx_cli.archive.python_files.litserve import (
    NOT_LITSERVE,
    LitServeFacts,
    is_litserve,
    read_litserve,
)
from tsx_cli.common.failure import CliError

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class PythonModel(NamedTuple):
    """A model in a Python file.

    Attributes:
        name: The name of the model.
        target: The name of its class or function.
        is_batched: Whether the function takes a list of requests.
        is_async: Whether each request is a task of an event loop.
        settings: The keys of model-config.yaml that the file sets.
        litserve: What the file says about a class of LitServe.
    """

    name: str
    target: str
    is_batched: bool
    is_async: bool
    settings: dict[str, Any]
    litserve: LitServeFacts = NOT_LITSERVE


def split_target(path: Path) -> tuple[Path, str | None]:
    """Split FILE:NAME."""
    file, target = split_handler(str(path))
    return Path(file), target


def find_models(path: Path) -> list[PythonModel]:
    """Return the models of a file, or the one of FILE:NAME.

    Raises:
        CliError: The file is not valid Python, or has no model of this name.
    """
    file, target = split_target(path)
    source = parse(file)
    functions = {node.name: node for node in source.body if isinstance(node, Function)}
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    parents = {
        base.id for node in classes.values() for base in node.bases if isinstance(base, ast.Name)
    }
    models = []
    if function := functions.get(target or METHOD):
        name = default_model_name(file) if function.name == METHOD else function.name
        models.append(_model(file, name, function.name, function, source.body))
    for name, node in classes.items():
        method = _method(node, classes)
        is_chosen = name == target if target else not name.startswith("_") and name not in parents
        if method is not None and is_chosen:
            models.append(
                _litserve_model(file, source, node)
                if is_litserve(node, classes)
                else _model(file, model_name(name), name, method, node.body)
            )
    if target and not models:
        raise CliError(
            f"{file} has neither a function {target} nor a class {target} with a method {METHOD}"
            f" that is written there; it has {', '.join([*functions, *classes]) or 'none'}"
        )
    return models


def model_name(class_name: str) -> str:
    """Return the name of a class's model: `text_model` for `TextModel`."""
    return _WORD_START.sub("_", class_name).lower()


def is_python_file(path: Path) -> bool:
    """Tell whether a path is FILE.py with models, or FILE.py:NAME."""
    file, target = split_target(path)
    return (
        file.suffix == ".py" and file.is_file() and (target is not None or bool(find_models(file)))
    )


def one_model_each(path: Path) -> list[Path]:
    """Return FILE:NAME for each model of a file."""
    file, target = split_target(path)
    return [path] if target else [Path(f"{file}:{model.target}") for model in find_models(file)]


def default_name(path: Path) -> str:
    """Return the name of the model of FILE:NAME."""
    return find_models(path)[0].name


def setting_key(name: str) -> str | None:
    """Return the key of model-config.yaml that a name means; batch_size is batchSize."""
    return next((key for key in keys_of(ModelConfig) if _fold(key) == _fold(name)), None)


def _fold(name: str) -> str:
    return name.replace("_", "").lower()


def _method(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Function | None:
    """Return the method `predict` of a class, which may be that of a parent in the same file."""
    for statement in node.body:
        if isinstance(statement, Function) and statement.name == METHOD:
            return statement
    for base in node.bases:
        parent = classes.get(base.id) if isinstance(base, ast.Name) else None
        others = {name: other for name, other in classes.items() if other is not node}
        if parent is not None and parent is not node and (method := _method(parent, others)):
            return method
    return None


def _model(
    file: Path, name: str, target: str, function: Function, statements: Sequence[ast.stmt]
) -> PythonModel:
    arguments = function.args
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    is_static = any(ast.unparse(item) == "staticmethod" for item in function.decorator_list)
    is_method = target != function.name and not is_static
    is_batched = parameters[is_method:] == [BATCH] and not arguments.kwonlyargs
    is_async = isinstance(function, ast.AsyncFunctionDef) and not is_batched
    return PythonModel(name, target, is_batched, is_async, _assigned_settings(file, statements))


def _litserve_model(file: Path, source: ast.Module, node: ast.ClassDef) -> PythonModel:
    facts = read_litserve(source, node)
    return PythonModel(
        facts.name or model_name(node.name),
        node.name,
        "batchSize" in facts.settings,
        facts.is_async,
        _assigned_settings(file, node.body),
        facts,
    )


def _assigned_settings(file: Path, statements: Sequence[ast.stmt]) -> dict[str, Any]:
    """Return the settings that a class or a module assigns."""
    settings = {}
    for statement in statements:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        for key in filter(None, map(setting_key, names)):
            try:
                settings[key] = ast.literal_eval(statement.value)
            except (ValueError, TypeError):
                raise CliError(
                    f"{file}, line {statement.lineno}: `{ast.unparse(statement)}` sets {key},"
                    " so its value must be written out, such as 8; rename it if it is none"
                ) from None
    return settings
