"""Which page of the site each document of the repository becomes, and its links rewritten for it.

Covers: the documents in the root, whose place in the site is another one than in the repository.
Pure: text in, text out; nothing here needs MkDocs.
"""

from __future__ import annotations

import posixpath
import re

DOCS = "docs/"
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture/index.md",
    "SECURITY.md": "guides/security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Document in the root -> page of the site."""
ROOT_FILES = {"LICENSE": "LICENSE.txt"}
"""File in the root -> file of the site that is copied as it is."""
_PLACES = {**ROOT_PAGES, **ROOT_FILES}
_ORIGINS = {page: document for document, page in _PLACES.items()}
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
_NAMED = re.compile(r"(?<![\w/#.\"'])docs/([\w/-]+)\.md\b")
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def page_of(document: str) -> str | None:
    """Return the site's path of a path in the repository, None if the site does not have it."""
    if document in _PLACES:
        return _PLACES[document]
    return document.removeprefix(DOCS) if document.startswith(DOCS) else None


def document_of(page: str) -> str:
    """Return the path in the repository that a page of the site was made of."""
    return _ORIGINS.get(page, DOCS + page)


def for_site(text: str, page: str) -> str:
    """Return a document's Markdown with relative links that lead from `page` to pages of the site.

    Links to what the site does not have stay as they are, so that MkDocs complains about them.
    """
    document = document_of(page)

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(document), link[2]))
        to = page_of(target)
        if to is None:
            return link[0]
        return f"{link[1]}{posixpath.relpath(to, posixpath.dirname(page))}{link[3] or ''}{link[4]}"

    pieces = _FENCE.split(text)
    pieces[::2] = [_LINK.sub(rewritten, piece) for piece in pieces[::2]]
    return "".join(pieces)


def linked(html: str, page: str) -> str:
    """Return a page with links at the documents that its text names, as docstrings do by path."""

    def link(named: re.Match[str]) -> str:
        to = posixpath.relpath(f"{named[1]}.html", posixpath.dirname(page))
        return f'<a href="{to}">{named[0]}</a>'

    return _NAMED.sub(link, html)
