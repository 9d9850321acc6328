"""Links between the Markdown files of the repository, including those outside the site."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from markdown.extensions.toc import slugify

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        slugify(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", ""), "-")
        for title in titles
    }


def test_every_link_of_a_markdown_file_has_an_existing_target() -> None:
    folders = ("benchmarks", "changes", "docs", "examples", "infra", "packages")
    pages = [
        *ROOT.glob("*.md"),
        *(page for name in folders for page in (ROOT / name).rglob("*.md")),
    ]
    assert len(pages) > 70
    dead = []
    for page in pages:
        # Links in `changes` are relative to the root, since these files become part of CHANGELOG.md.
        for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            folder = ROOT if page.parent.name == "changes" else page.parent
            file = (folder / target).resolve() if target else page
            is_heading = anchor and file.suffix == ".md" and not anchor.startswith("tsx_")
            if not file.exists() or (is_heading and anchor not in anchors(file)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert dead == []
