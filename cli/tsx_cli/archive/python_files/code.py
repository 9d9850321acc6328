"""What the code of a Python file needs: local modules, data and requirements.

The code is read, and does not run.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tsx_archiver.names import MANIFEST_PATH, is_inside
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_archiver.packing import files_below
from tsx_cli.common.failure import CliError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DISTRIBUTION = "tsx-serve"
REQUIREMENTS = "requirements.txt"
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


def parse(file: Path) -> ast.Module:
    """Parse a file.

    Raises:
        CliError: The file is not valid Python.
    """
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


def read_script_block(file: Path) -> dict[str, Any]:
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


def find_imports(file: Path) -> tuple[list[Path], set[str]]:
    """Return the file with the local modules that it imports, and the names of other modules.

    Raises:
        CliError: A local module is not valid Python.
    """
    folder, files, packages = file.parent, [file], set()
    for path in files:  # The list grows.
        if path.suffix != ".py":
            continue
        package = path.relative_to(folder).parts[:-1]
        for node in ast.walk(parse(path)):
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
                files += [path for path in local if path not in files]
                if not local:
                    packages.add(name[0])
    return files, packages - set(sys.stdlib_module_names)


def _local_files(folder: Path, module: Sequence[str]) -> Iterator[Path]:
    """Yield the files in a folder of a module and of the packages that contain it."""
    for depth in range(1, len(module) + 1):
        path = folder.joinpath(*module[:depth])
        names = [path / "__init__.py", *(Path(f"{path}{end}") for end in _MODULE_SUFFIXES)]
        yield from [name for name in names if name.is_file()][:1]


def installed_requirements(modules: set[str]) -> list[str]:
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


def find_data_files(module: Path, folder: Path) -> Iterator[Path]:
    """Yield the files beside a Python file whose paths it has as texts, and so may open.

    A directory must be an argument of a function that reads files, or an operand of `/`. Hidden
    files, such as .env, and links out of a directory are left out.
    """
    bases, names, joined = {folder, module.parent}, set[str](), set[ast.AST]()
    for node in ast.walk(parse(module)):
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
