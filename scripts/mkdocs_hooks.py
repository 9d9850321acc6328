"""Hooks of mkdocs.yml, which keep the paths of pages and document attributes by comments."""

from __future__ import annotations

import ast
import fnmatch
import functools
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
# marks code blocks that tests/docs/test_documentation.py runs
BLOCK_MARKER = re.compile(r"^```(\w+) (?:run|write (\S+))$", re.MULTILINE)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
# Factors of the rank in search results: explanations come before references and records.
BOOSTS = {
    "docs/start/faq.md": 2.0,
    "docs/reference/configuration.md": 1.0,
    "docs/reference/*": 0.1,
    "docs/guides/deploy/*": 0.5,
    "docs/guides/torchserve-command.md": 0.1,
    "docs/concepts/performance.md": 0.5,
    "docs/concepts/*": 0.05,
    "benchmarks/*": 0.01,
    "CHANGELOG.md": 0.1,
}
FOLDERS = ("start", "guides", "concepts", "reference")
REDIRECT = """<!doctype html><meta charset="utf-8"><title>Moved</title>
<meta http-equiv="refresh" content="0; url={0}"><a href="{0}">This page has moved.</a>
"""
BOUNDS = {"gt": "more than", "ge": "at least", "le": "at most"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Name sources as in the repository, so that relative links work there and on the site.

    The pages of docs/ are at the root of the site. Linked pages outside docs/ are in `repository/`.
    """
    root = Path(config.config_file_path).parent
    location = (str(root), config.site_dir, config.use_directory_urls)
    addresses = {
        f"docs/{file.src_uri}": file.dest_uri for file in files if file.src_dir == config.docs_dir
    }
    pages: dict[str, File] = {}
    pending_paths = list(addresses)
    while pending_paths:
        path = pending_paths.pop()
        if path in pages or not (root / path).is_file():
            continue
        pages[path] = File(
            path,
            *location,
            dest_uri=addresses.get(path) or f"repository/{File(path, *location).dest_uri}",
        )
        if path.endswith(".md"):
            links = LINK.findall((root / path).read_text(encoding="utf-8"))
            pending_paths += [
                posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links
            ]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *pages.values()])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of tested blocks by the name of a written file, or remove them.

    An escaped pipe in a table's code becomes a plain one.
    """
    boost = next(
        (boost for paths, boost in BOOSTS.items() if fnmatch.fnmatch(page.file.src_uri, paths)), 1.0
    )
    page.meta.setdefault("search", {"boost": boost})
    markdown = BLOCK_MARKER.sub(
        lambda block: f"```{block[1]}" + (f' title="{block[2]}"' if block[2] else ""), markdown
    )
    return ROW.sub(
        lambda row: re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row[0]), markdown
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Write a redirect at each path that a page had before docs/ had folders."""
    site = Path(config.site_dir)
    for folder in FOLDERS:
        for page in (site / folder).rglob("index.html"):
            old = site / page.relative_to(site / folder)
            if not old.exists():
                old.parent.mkdir(parents=True, exist_ok=True)
                old.write_text(
                    REDIRECT.format(posixpath.relpath(page.parent, old.parent) + "/"),
                    encoding="utf-8",
                )


class AttributesFromSource(griffe.Extension):
    """An extension that documents attributes by the description in `Field` or by a comment.

    The comment is at the end of the line or, for an attribute of a module, above it.
    """

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        if attr.docstring is not None or not isinstance(node, ast.Assign | ast.AnnAssign):
            return
        # An attribute that __init__ sets from the parameter of the same name has no default.
        if isinstance(node.value, ast.Name) and node.value.id == attr.name:
            attr.value = None
        text = _field(node, attr) or _comment(node, _lines(Path(str(attr.filepath))))
        if text:
            attr.docstring = griffe.Docstring(text[0].upper() + text[1:], parent=attr)


def _field(node: ast.Assign | ast.AnnAssign, attr: griffe.Attribute) -> str:
    call = node.value
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Field"
    ):
        return ""
    if isinstance(attr.value, griffe.ExprCall):
        attr.value = attr.value.arguments[0]  # the default value
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    bounds = ", ".join(
        f"{label} {ast.unparse(keywords[name])}"
        for name, label in BOUNDS.items()
        if name in keywords
    )
    description = keywords.get("description")
    text = str(description.value) if isinstance(description, ast.Constant) else ""
    return f"{text} ({bounds})" if bounds else text


def _comment(node: ast.Assign | ast.AnnAssign, lines: list[str]) -> str:
    line_comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
    lines_above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.startswith("# "):
            break
        lines_above.insert(0, line[2:])
    return line_comment or " ".join(lines_above)


@functools.cache
def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
