"""Specs of archives for Python files: the models in a file, their code, data and settings."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from tsx_archiver import (
    DEFAULT_VERSION,
    ArchiveSpec,
    ModelConfig,
    load_yaml_file,
    parse_model_config,
    split_handler,
)
from tsx_archiver.metadata.keys import keys_of
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_archiver.python_file import HANDLER, LITSERVE, PythonFileFacts
from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.archive.litserve_file import NOT_LITSERVE, LitServeFacts, is_litserve, read_litserve
from tsx_cli.common.failure import CliError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

METHOD, BATCH = "predict", "batch"
DISTRIBUTION = "tsx-serve"
REQUIREMENTS = "requirements.txt"
NO_MODEL = f"no class with a method {METHOD}, and no function {METHOD}; add one"
# Functions whose text arguments may name a directory with data.
_READERS = re.compile("Path|join|joinpath|with_name|from_pretrained|open|(load|read)\\w*")
# https://packaging.python.org/en/latest/specifications/inline-script-metadata
_SCRIPT_BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
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


def find_models(path: Path) -> list[PythonModel]:
    """Return the models of a file, or the one of `FILE:NAME`, without running the file.

    Raises:
        CliError: The file is not valid Python, or has no model of this name.
    """
    file, target = _split(path)
    source = _parse(file)
    functions = {node.name: node for node in source.body if isinstance(node, Function)}
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    methods = {name: _method(node, classes) for name, node in classes.items()}
    parents = {
        base.id for node in classes.values() for base in node.bases if isinstance(base, ast.Name)
    }
    models = [
        _model(name if name != METHOD else file.stem, name, node, source.body)
        for name, node in functions.items()
        if name == (target or METHOD)
    ]
    models += [
        _litserve_model(source, classes[name])
        if is_litserve(classes[name], classes)
        else _model(model_name(name), name, method, classes[name].body)
        for name, method in methods.items()
        if method is not None
        and (name == target if target else not name.startswith("_") and name not in parents)
    ]
    if target and not models:
        raise CliError(
            f"{file} has no class {target} with a method {METHOD}, and no function {target}; name"
            f" one of {', '.join([*functions, *classes]) or 'its classes'}"
        )
    return models


def model_name(class_name: str) -> str:
    """Return the name of a class's model: `text_model` for `TextModel`."""
    return _WORD_START.sub("_", class_name).lower()


def is_python_file(path: Path) -> bool:
    """Tell whether a path is FILE.py with models, or FILE.py:NAME."""
    file, target = _split(path)
    return (
        file.suffix == ".py" and file.is_file() and (target is not None or bool(find_models(file)))
    )


def one_model_each(path: Path) -> list[Path]:
    """Return FILE:NAME for each model of a file."""
    file, target = _split(path)
    return [path] if target else [Path(f"{file}:{model.target}") for model in find_models(file)]


def default_name(path: Path) -> str:
    """Return the name of the model of FILE:NAME."""
    return find_models(path)[0].name


def watched_files(path: Path) -> list[Path]:
    """Return the file, and files beside it that would change its model if they were added."""
    file, _ = _split(path)
    _, modules = _imports(file)
    return [
        file,
        *(file.parent / name for name in (DEFAULT_CONFIG, *(f"{module}.py" for module in modules))),
    ]


@contextmanager
def python_file_spec(
    path: Path,
    name: str | None = None,
    version: str | None = None,
    extra_files: Sequence[str] = (),
    config_file: Path | None = None,
    *,
    requirements: bool = True,
) -> Iterator[tuple[ArchiveSpec, list[str]]]:
    """Yield the spec of an archive, and notes; its files exist until the context ends.

    Args:
        path: FILE or FILE:NAME.
        name: The name of the model.
        version: The version of the model.
        extra_files: Further files.
        config_file: A model-config.yaml, in place of the one beside the file.
        requirements: Whether to pack the requirements of the file.

    Raises:
        CliError: The file, or a file that it imports, cannot be used.
    """
    file, _ = _split(path)
    models = find_models(path)
    if len(models) != 1:
        names = ", ".join(model.target for model in models)
        raise CliError(
            f"{file} has {f'several models, {names}: name one, as {file}:{models[0].target}' if models else NO_MODEL}"
        )
    (model,) = models
    script = _script_metadata(file)
    code, packages = _imports(file)
    data = [path for module in code for path in _data_files(module, file.parent)]
    members = {member.relative_to(file.parent).as_posix(): member for member in [*code, *data]}
    config = _settings(file, config_file, script, model)
    litserve = model.litserve
    if unknown := set(litserve.unknown) - set(config.get("init_args") or ()):
        raise CliError(
            f"{model.target}: {', '.join(sorted(unknown))} must be written out where it is"
            " constructed, since that code does not run; or set init_args in model-config.yaml"
        )
    needed = script.get("dependencies", _installed(packages)) if requirements else []
    archive_name = name or model.name
    call = "batches of requests" if model.is_batched else "one request a call"
    notes = [
        f"{file}: {model.target} is the model {archive_name}, version {version or DEFAULT_VERSION}; "
        + (f"{call}, asynchronous" if model.is_async else call)
    ]
    if litserve.unused:
        notes.append(f"note: LitServer's {', '.join(litserve.unused)} have no effect")
    notes += [f"files {', '.join(sorted(members))}"] if len(members) > 1 else []
    notes += [f"settings {json.dumps(config)}"] if config else []
    notes += [f"requirements {', '.join(needed)}"] if needed else []
    with scratch_directory("tsx-python-") as folder:
        (folder / DEFAULT_CONFIG).write_text(yaml.safe_dump(config))
        (folder / REQUIREMENTS).write_text("".join(f"{line}\n" for line in needed))
        facts = PythonFileFacts(
            *(file.name, model.target, model.is_batched, model.is_async),
            attributes=litserve.attributes,
        )
        yield (
            ArchiveSpec(
                model_name=archive_name,
                version=version or DEFAULT_VERSION,
                handler=HANDLER if litserve is NOT_LITSERVE else LITSERVE,
                files=members,
                extra_files=extra_files,
                config_file=folder / DEFAULT_CONFIG if config else None,
                requirements_file=folder / REQUIREMENTS if needed else None,
                extra_manifest=facts.as_manifest(),
            ),
            notes,
        )


def _split(path: Path) -> tuple[Path, str | None]:
    file, target = split_handler(str(path))
    return Path(file), target


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise CliError(
            f"{file} is not valid Python, line {error.lineno}: {error.msg}:"
            f" {(error.text or '').strip()}"
        ) from error
    except ValueError as error:  # null bytes
        raise CliError(f"{file} is not valid Python: {error}") from error


def _method(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Function | None:
    """Return the method `predict` of a class, which may be that of a parent in the same file."""
    for statement in node.body:
        if isinstance(statement, Function) and statement.name == METHOD:
            return statement
    for base in node.bases:
        parent = classes.get(base.id) if isinstance(base, ast.Name) else None
        if parent is not None and parent is not node and (method := _method(parent, classes)):
            return method
    return None


def _model(
    name: str, target: str, function: Function, statements: Sequence[ast.stmt]
) -> PythonModel:
    parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
    is_batched = parameters == [BATCH] and not function.args.kwonlyargs
    is_async = isinstance(function, ast.AsyncFunctionDef) and not is_batched
    return PythonModel(name, target, is_batched, is_async, _assigned_settings(statements))


def _litserve_model(source: ast.Module, node: ast.ClassDef) -> PythonModel:
    facts = read_litserve(source, node)
    return PythonModel(
        facts.name or model_name(node.name),
        node.name,
        "batchSize" in facts.settings,
        facts.is_async,
        _assigned_settings(node.body),
        facts,
    )


def _assigned_settings(statements: Sequence[ast.stmt]) -> dict[str, Any]:
    """Return the settings that a class or a module assigns, by their keys in model-config.yaml.

    Names may be written as in Python: batch_size is batchSize.
    """
    keys = {_fold(key): key for key in keys_of(ModelConfig)}
    settings = {}
    for statement in statements:
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [getattr(statement, "target", None)]
        )
        value = getattr(statement, "value", None)
        for target in targets:
            key = keys.get(_fold(target.id)) if isinstance(target, ast.Name) else None
            if key is not None and isinstance(value, ast.expr):
                try:
                    settings[key] = ast.literal_eval(value)
                except (ValueError, TypeError):
                    raise CliError(
                        f"line {statement.lineno}: `{ast.unparse(statement)}` sets {key}, so"
                        " its value must be written out, such as 8; rename it if it is none"
                    ) from None
    return settings


def _fold(name: str) -> str:
    return name.replace("_", "").lower()


def _script_metadata(file: Path) -> dict[str, Any]:
    """Return the block `# /// script` of a file (PEP 723)."""
    match = _SCRIPT_BLOCK.search(file.read_text(encoding="utf-8"))
    if match is None:
        return {}
    lines = [
        line[2:] if line.startswith("# ") else line[1:] for line in match["content"].splitlines()
    ]
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise CliError(f"{file}: the block `# /// script` is not TOML: {error}") from error


def _settings(
    file: Path, config_file: Path | None, script: Mapping[str, Any], model: PythonModel
) -> dict[str, Any]:
    """Merge model-config.yaml, `[tool.tsx]` of the file, and the settings of its class."""
    beside = file.parent / DEFAULT_CONFIG
    path = config_file or (beside if beside.is_file() else None)
    config = {} if path is None else load_yaml_file(path) or {}
    keys = {_fold(key): key for key in keys_of(ModelConfig)}
    table = script.get("tool", {}).get("tsx", {})
    inline = {keys.get(_fold(key), key): value for key, value in table.items()}
    defaults = model.litserve.settings
    merged = {**defaults, **config, **inline, **model.settings}
    if "init_args" in defaults:
        merged["init_args"] = defaults["init_args"] | (merged["init_args"] or {})
    _, problems = parse_model_config(merged)
    if problems:
        raise CliError(f"the settings of {file} cannot be used: {'; '.join(problems)}")
    return merged


def _imports(file: Path) -> tuple[list[Path], set[str]]:
    """Return the files of a Python file and the local modules that it imports, and other modules.

    Raises:
        CliError: A local module is not valid Python.
    """
    _parse(file)
    folder = file.parent.resolve()
    finder = ModuleFinder([str(folder)])
    try:
        finder.run_script(str(file))
    except SyntaxError as error:
        raise CliError(
            f"{error.filename}, line {error.lineno}: {error.msg}; it is imported by {file}"
        ) from error
    # Builtin modules have no file.
    module_files = filter(None, (vars(module)["__file__"] for module in finder.modules.values()))
    names = {Path(name).resolve() for name in module_files}
    local = [
        file.parent / name.relative_to(folder)
        for name in sorted(names)
        if name.is_relative_to(folder)
    ]
    packages = {name.partition(".")[0] for name in finder.badmodules}
    return local, packages - set(sys.stdlib_module_names)


def _installed(modules: set[str]) -> list[str]:
    """Return the installed distributions of modules as requirements.

    Those that tsx itself needs are left out, because every target has them.
    """
    known = {
        _normal(requirement)
        for requirement in metadata.requires(DISTRIBUTION) or ()
        if "extra ==" not in requirement
    }
    distributions = metadata.packages_distributions()
    names = {name for module in modules for name in distributions.get(module, ())}
    return sorted(
        f"{name}=={metadata.version(name).partition('+')[0]}"
        for name in names
        if _normal(name) not in known | {DISTRIBUTION}
    )


def _normal(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0] if name else "").lower()


def _data_files(module: Path, folder: Path) -> Iterator[Path]:
    """Yield the files beside a Python file whose paths it has as texts, and so may open.

    A directory must be an argument of a function that reads files, or an operand of `/`.
    """
    texts, directories = set(), set()
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            directories |= {getattr(side, "value", None) for side in (node.left, node.right)}
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if _READERS.fullmatch(function):
                directories |= {getattr(argument, "value", None) for argument in node.args}
    for text in sorted(texts):
        if not text or "\0" in text or Path(text).is_absolute() or ".." in Path(text).parts:
            continue
        path = folder / text
        try:
            is_directory = text in directories and path.is_dir() and path != folder
            if path.is_file():
                yield path
            elif is_directory:
                yield from (member for member in sorted(path.rglob("*")) if member.is_file())
        except OSError:  # The text is too long for a name.
            continue
