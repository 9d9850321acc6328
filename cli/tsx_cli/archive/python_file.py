"""Specs of archives for Python files: the models in a file, their code, data and settings."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from tsx_archiver import (
    DEFAULT_VERSION,
    ArchiveSpec,
    ModelConfig,
    default_model_name,
    load_yaml_file,
    parse_model_config,
    split_handler,
)
from tsx_archiver.metadata.keys import keys_of
from tsx_archiver.names import MANIFEST_PATH, is_inside
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_archiver.packing import extra_paths, files_below
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
# https://packaging.python.org/en/latest/specifications/dependency-specifiers
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][\w.-]*\s*(\[[\w\s,.-]*\])?\s*([@<>=!~;(][^\r\n]*)?", re.ASCII
)
_OWN_FILES = (DEFAULT_CONFIG, REQUIREMENTS, MANIFEST_PATH)  # An archive has its own ones.
_MODULE_SUFFIXES = (*EXTENSION_SUFFIXES, ".py")
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
        _model(file, name if name != METHOD else default_model_name(file), name, node, source.body)
        for name, node in functions.items()
        if name == (target or METHOD)
    ]
    models += [
        _litserve_model(file, source, classes[name])
        if is_litserve(classes[name], classes)
        else _model(file, model_name(name), name, method, classes[name].body)
        for name, method in methods.items()
        if method is not None
        and (name == target if target else not name.startswith("_") and name not in parents)
    ]
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
        extra_files: Further files; those below the folder of the file keep their paths.
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
    folder, other_files = file.parent.resolve(), list[Path]()
    for extra in extra_paths(extra_files, None):
        place = extra.parent.resolve() / extra.name
        if not place.is_relative_to(folder):
            other_files.append(extra)
            continue
        for member in files_below(place) if place.is_dir() else [place]:
            members[member.relative_to(folder).as_posix()] = member
    config = _settings(file, config_file, script, model)
    litserve = model.litserve
    if unknown := set(litserve.unknown) - set(config.get("init_args") or ()):
        raise CliError(
            f"{model.target}: {', '.join(sorted(unknown))} must be written out where it is"
            " constructed, since that code does not run; or set init_args in model-config.yaml"
        )
    needed = script.get("dependencies") if requirements else []
    needed = _installed(packages) if needed is None else needed
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
                extra_files=other_files,
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
    except (RecursionError, MemoryError) as error:
        raise CliError(f"{file} cannot be read: its expressions are nested too deeply") from error


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
                        f"{file}, line {statement.lineno}: `{ast.unparse(statement)}` sets {key},"
                        " so its value must be written out, such as 8; rename it if it is none"
                    ) from None
    return settings


def _fold(name: str) -> str:
    return name.replace("_", "").lower()


def _script_metadata(file: Path) -> dict[str, Any]:
    """Return the block `# /// script` of a file (PEP 723)."""
    with tokenize.open(file) as text:
        blocks = [match["content"] for match in _SCRIPT_BLOCK.finditer(text.read())]
    if len(blocks) > 1:
        raise CliError(f"{file} has {len(blocks)} blocks `# /// script`; join them")
    lines = [
        line[2:] if line.startswith("# ") else line[1:] for line in "".join(blocks).splitlines()
    ]
    try:
        script = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise CliError(f"{file}: the block `# /// script` is not TOML: {error}") from error
    needed = script.get("dependencies", [])
    if not isinstance(needed, list) or not all(isinstance(line, str) for line in needed):
        raise CliError(f"{file}: `dependencies` in `# /// script` must be a list of texts")
    # pip would read anything else in a file of requirements as options, files and addresses.
    for line in needed:
        if not _REQUIREMENT.fullmatch(line) or " --" in line:
            raise CliError(
                f"{file}: {line!r:.200} in `dependencies` is not the requirement of a package, such"
                " as numpy>=2"
            )
    return script


def _settings(
    file: Path, config_file: Path | None, script: Mapping[str, Any], model: PythonModel
) -> dict[str, Any]:
    """Merge model-config.yaml, `[tool.tsx]` of the file, and the settings of its class."""
    beside = file.parent / DEFAULT_CONFIG
    path = config_file or (beside if beside.is_file() else None)
    config = {} if path is None else load_yaml_file(path) or {}
    tool = script.get("tool", {})
    table = tool.get("tsx", {}) if isinstance(tool, dict) else tool
    for mapping in (config, table):
        if not isinstance(mapping, dict):
            raise CliError(f"the settings of {file} must have keys, such as batchSize: {mapping!r}")
    keys = {_fold(key): key for key in keys_of(ModelConfig)}
    inline = {keys.get(_fold(key), key): value for key, value in table.items()}
    defaults = model.litserve.settings
    merged = {**defaults, **config, **inline, **model.settings}
    if "init_args" in defaults:
        merged["init_args"] = defaults["init_args"] | (merged["init_args"] or {})
    _, problems = parse_model_config(merged)
    if problems:
        target = f"{model.target} in {file}"
        raise CliError(f"the settings of {target} cannot be used: {'; '.join(problems)}")
    return merged


def _imports(file: Path) -> tuple[list[Path], set[str]]:
    """Return the files of a Python file and the local modules that it imports, and other modules.

    Raises:
        CliError: A local module is not valid Python.
    """
    folder, files, others = file.parent, [file], set()
    for path in files:  # It grows.
        if path.suffix != ".py":
            continue
        package = path.relative_to(folder).parts[:-1]
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else ()
                module = [*base, *filter(None, (node.module or "").split("."))]
                names = [[*module, alias.name] for alias in node.names]
            elif isinstance(node, ast.Call) and _function_name(node) == "import_module":
                names = [text.split(".") for text in map(_text, node.args[:1]) if text]
            else:
                continue
            for name in names:
                local = list(_local_files(folder, name))
                files += [found for found in local if found not in files]
                if not local:
                    others.add(name[0])
    return files, others - set(sys.stdlib_module_names)


def _local_files(folder: Path, module: Sequence[str]) -> Iterator[Path]:
    """Yield the files in a folder of a module and of the packages that contain it."""
    for depth in range(1, len(module) + 1):
        path = folder.joinpath(*module[:depth])
        names = [path / "__init__.py", *(Path(f"{path}{end}") for end in _MODULE_SUFFIXES)]
        yield from [name for name in names if name.is_file()][:1]


def _installed(modules: set[str]) -> list[str]:
    """Return the installed distributions of modules as requirements.

    Those that tsx itself needs are left out, because every target has them.
    """
    known = {
        _normal(requirement)
        for requirement in metadata.requires(DISTRIBUTION) or ()
        if "extra ==" not in requirement
    }
    distributions = metadata.packages_distributions() if modules else {}
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

    A directory must be an argument of a function that reads files, or an operand of `/`. Hidden
    files, such as .env, and links out of a directory are left out.
    """
    bases, names, joined = {folder, module.parent}, set[str](), set[ast.AST]()
    for node in ast.walk(_parse(module)):
        parts = [] if node in joined else list(_path_parts(node))
        name = "/".join(parts)
        if any(os.path.isfile(base / name) for base in bases):  # noqa: PTH113  # Path.is_file raises for a long name.
            names.add(name)
            joined.update(ast.walk(node))
        elif not isinstance(node, ast.Constant):
            names.update(parts)
    for name in names - {*_OWN_FILES}:
        parts = list(Path(name).parts)
        if not parts or Path(name).is_absolute() or any(part[0] == "." for part in parts):
            continue
        for path in (base / name for base in bases):
            if os.path.isfile(path):  # noqa: PTH113
                yield path
            elif os.path.isdir(path):  # noqa: PTH112
                roots = (folder, path)
                yield from files_below(path, is_left_out=partial(_is_left_out, roots))


def _is_left_out(roots: Sequence[Path], path: Path) -> bool:
    return path.name.startswith(".") or not any(is_inside(path, root) for root in roots)


def _path_parts(node: ast.AST) -> Iterator[str]:
    """Yield the texts that an expression joins to a path, such as HERE / "labels" / "en.json"."""
    children: Sequence[ast.AST] = ()
    if text := _text(node):
        yield text
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        children = (node.left, node.right)
    elif isinstance(node, ast.Call):
        children = node.args if _READERS.fullmatch(_function_name(node)) else ()
    for child in children:
        yield from _path_parts(child)


def _text(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) else ""


def _function_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
