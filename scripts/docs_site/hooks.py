"""Hooks of MkDocs: the root's documents as pages, decisions in the navigation, paths as links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from scripts.docs_site import pages

ROOT = Path(__file__).parents[2]
DECISIONS = "decisions/"
REFERENCE = "reference/"
LIST_OF_DECISIONS = "<!-- decisions -->"


def _decisions() -> list[str]:
    folder = ROOT / pages.DOCS / DECISIONS
    return [DECISIONS + path.name for path in sorted(folder.glob("[0-9]*.md"))]


def on_config(config: Any) -> Any:
    """Put every decision into the navigation, so that a new one needs no second entry."""
    for entry in config.nav:
        for title, target in entry.items():
            if target == DECISIONS:
                entry[title] = [DECISIONS + "index.md", *_decisions()]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the documents of the root, each under the name that it has in the site."""
    for name, page in {**pages.ROOT_PAGES, **pages.ROOT_FILES}.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links between documents; list the decisions where their index asks for it."""
    if LIST_OF_DECISIONS in markdown:
        lines = [_titled(name) for name in _decisions()]
        markdown = markdown.replace(LIST_OF_DECISIONS, "\n".join(lines))
    return pages.for_site(markdown, page.file.src_uri)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Make links of the documents that docstrings name by path."""
    at = page.file.src_uri
    return pages.linked(html, at) if at.startswith(REFERENCE) else html


def _titled(name: str) -> str:
    with (ROOT / pages.DOCS / name).open() as lines:
        title = lines.readline().removeprefix("# ").strip()
    return f"- [{title}]({name.removeprefix(DECISIONS)})"
