"""The public names of TorchServe 0.12's packages, listed in a file or read from an installation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("model_archiver", "ts", "workflow_archiver")


def names() -> dict[str, list[str]]:
    """Return the names by module."""
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return {module: names.split() for module, _, names in (line.partition(":") for line in lines)}


def installed_names(site_packages: Path) -> dict[str, list[str]]:
    """Return the functions, classes and variables that modules define.

    Loggers, version files and TorchServe's own tests are left out.
    """
    paths = {
        ".".join(path.relative_to(site_packages).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for package in PACKAGES
        for path in (site_packages / package).rglob("*.py")
    }
    defined = {
        module: sorted(set(filter(_is_public, _defined(ast.parse(path.read_bytes()).body))))
        for module, path in sorted(paths.items())
        if ".unit_tests.test_" not in module.replace("test_utils", "") and "-" not in module
    }
    return {module: names for module, names in defined.items() if names}


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name not in ("logger", "version_path")


def _defined(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.Try):
            yield from _defined(
                [
                    *statement.body,
                    *statement.orelse,
                    *(line for handler in statement.handlers for line in handler.body),
                ]
            )
        elif isinstance(statement, ast.If) and "__main__" not in ast.unparse(statement.test):
            yield from _defined([*statement.body, *statement.orelse])
