"""The site of the documents: links of pages that move, and no assets from elsewhere."""

from __future__ import annotations

import pytest

from scripts.docs_site import assets, pages


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/guides/files.md#models)", "[a](guides/files.md#models)"),
        ("index.md", "[a](SECURITY.md)", "[a](guides/security.md)"),
        ("index.md", "![a](docs/images/processes.svg)", "![a](images/processes.svg)"),
        ("index.md", "[a](LICENSE)", "[a](LICENSE.txt)"),
        ("guides/security.md", "[a](docs/faults.md)", "[a](../faults.md)"),
        ("architecture/index.md", "[a](docs/decisions/index.md)", "[a](../decisions/index.md)"),
        ("architecture/journeys.md", "[a](../../ARCHITECTURE.md)", "[a](index.md)"),
        ("guides/files.md", "[a](reading.md#parquet)", "[a](reading.md#parquet)"),
        ("guides/files.md", "[a](#models)", "[a](#models)"),
        ("index.md", "[a](https://example.org/docs/x.md)", "[a](https://example.org/docs/x.md)"),
    ],
)
def test_a_link_leads_to_the_page_that_the_document_becomes(page, text, expected):
    assert pages.for_site(text, page) == expected


def test_a_link_to_what_the_site_does_not_have_stays_so_that_the_build_refuses_it():
    assert pages.for_site("[a](scripts/test)", "index.md") == "[a](scripts/test)"


def test_a_path_in_a_docstring_becomes_a_link_on_its_page_of_the_reference():
    text = "<td>None: no page (docs/guides/metrics.md).</td>"
    link = '<a href="../guides/metrics.html">docs/guides/metrics.md</a>'
    assert pages.linked(text, "reference/tfos.md") == f"<td>None: no page ({link}).</td>"


def test_code_is_no_link():
    text = "```python\nx = names[0](docs)\n```\n"
    assert pages.for_site(text, "index.md") == text


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<script src="//cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="http://fonts.example/css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<img src="HTTPS://pictures.example/a.png" alt="a">',
        '<img src="a.png" srcset="a.png 1x, https://pictures.example/a.png 2x">',
        "<style>@import 'https://fonts.example/css';</style>",
        '<p style="background: url(https://pictures.example/a.png)">',
        '<iframe src="https://video.example/1"></iframe>',
        '<svg><image href="https://pictures.example/a.png"/></svg>',
    ],
)
def test_an_asset_from_elsewhere_is_found(html):
    assert assets.from_elsewhere(html)


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://example.org">a link that a reader may follow</a>',
        '<script src="assets/site.js"></script><link rel="stylesheet" href="../assets/site.css">',
        '<link rel="canonical" href="https://docs.example/index.html">',
        '<img src="data:image/svg+xml,%3Csvg xmlns=%27http://www.w3.org/2000/svg%27/%3E" alt="">',
        '<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0"/></svg>',
        "<style>p { background: url(images/a.png) }</style>",
        "<p>see https://example.org</p>",
    ],
)
def test_what_a_page_does_not_load_is_no_asset(html):
    assert not assets.from_elsewhere(html)


def test_stylesheets_and_pictures_are_looked_at_too(tmp_path):
    (tmp_path / "index.html").write_text("<p>text</p>")
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    (tmp_path / "b.svg").write_text(
        '<svg><use xlink:href="https://pictures.example/b.svg#c"/></svg>'
    )
    assert assets.in_site(tmp_path) == [
        "a.css: https://fonts.example/a.woff2",
        "b.svg: https://pictures.example/b.svg#c",
    ]
