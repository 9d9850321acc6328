"""Renders a directory of templates into a user's directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.resources import files
from pathlib import PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined

SUFFIX = ".j2"


def render_tree(
    tree: str, values: Mapping[str, object], *, marks: str = "{{ }}"
) -> dict[PurePosixPath, str]:
    """Render the files of the template directory `tree`, and return them by path.

    Args:
        tree: The directory.
        values: The values of the templates; a missing value is an error.
        marks: The characters around values, for files that use `{{ }}` themselves.
    """
    loader = PackageLoader("tsx_templates", tree)
    # The files are not HTML, so values are not escaped.
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        variable_start_string=marks.split()[0],
        variable_end_string=marks.split()[1],
    )
    names = [name for name in loader.list_templates() if name.endswith(SUFFIX)]
    return {
        PurePosixPath(name.removesuffix(SUFFIX)): environment.get_template(name).render(values)
        for name in names
    }


def locked_names() -> list[str]:
    return sorted(
        lock.name.removesuffix(".txt") for lock in (files("tsx_templates") / "locks").iterdir()
    )


def locked_requirements(names: Collection[str]) -> dict[str, str]:
    """Return the pinned and hashed packages of `base`, extras or `sbom`, by name.

    An extra that adds no packages is left out.
    """
    locks = files("tsx_templates") / "locks"
    return {
        name: lock.read_text(encoding="utf-8")
        for name in sorted(names)
        if (lock := locks / f"{name}.txt").is_file()
    }
