"""Checks that a built site loads nothing from elsewhere.

    python -m scripts.docs_site.assets FOLDER

Links that a reader may follow do not matter; what a page loads on its own does.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADING = {
    ("link", "href"),
    *((tag, "src") for tag in ("audio", "embed", "iframe", "img", "input", "script", "source")),
    *((tag, "srcset") for tag in ("img", "source")),
    *(("object", "data"), ("track", "src"), ("video", "src"), ("video", "poster")),
    *(("image", "href"), ("image", "xlink:href"), ("use", "href"), ("use", "xlink:href")),
}
"""Attributes of HTML whose URL a browser fetches unasked."""
NAMES_ONLY = {"canonical", "next", "prev"}  # relations of <link> that nothing is fetched for
ELSEWHERE = re.compile(r"(?:^|[\s,])(?:https?:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:@import\s+|url\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


class _Page(HTMLParser):
    """Collects what one page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        values = {name: value or "" for name, value in attrs}
        self.found += IN_STYLES.findall(values.get("style", ""))
        if tag == "link" and values.get("rel", "") in NAMES_ONLY:
            return
        loaded = [value for name, value in values.items() if (tag, name) in LOADING]
        self.found += [url for url in loaded if ELSEWHERE.search(url)]

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += IN_STYLES.findall(data)


def from_elsewhere(text: str, suffix: str = ".html") -> list[str]:
    """Return the URLs on other hosts that a page (.html, .svg) or a stylesheet (.css) loads."""
    if suffix == ".css":
        return IN_STYLES.findall(text)
    page = _Page()
    page.feed(text)
    page.close()
    return page.found


def in_site(folder: Path) -> list[str]:
    """Return `FILE: URL` for everything that a page of the site would load from elsewhere."""
    return [
        f"{path.relative_to(folder)}: {url}"
        for path in sorted(folder.rglob("*"))
        if path.suffix in {".html", ".svg", ".css"}
        for url in from_elsewhere(path.read_text(), path.suffix)
    ]


def main() -> None:
    """Fail with one line per asset from elsewhere, or without any page."""
    folder = Path(sys.argv[1])
    if not (folder / "index.html").is_file():
        raise SystemExit(f"{folder} holds no site: there is no index.html")
    if found := in_site(folder):
        raise SystemExit("\n".join(["error: pages load assets from elsewhere:", *found]))


if __name__ == "__main__":
    main()
