"""What the documents say exists: paths, modules, links, the README's code, the table of faults."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from scripts import faults_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TOPS = "rpc|ps|feeding|tfos|tests|scripts|examples|docs"
PATH = re.compile(rf"`((?:{TOPS})/[\w./-]+?)`")
MODULE = re.compile(r"`((?:rpc|ps|feeding|tfos)(?:\.[a-z_]+)+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_documents_that_everybody_looks_for_exist():
    wanted = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
    wanted |= {f"docs/architecture/{name}.md" for name in ("journeys", "assumptions", "protocol")}
    wanted |= {"docs/faults.md", "docs/guides/performance.md"}
    assert wanted <= set(IDS)
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_named_paths_exist(document):
    missing = [name for name in PATH.findall(document.read_text()) if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_named_modules_exist(document):
    def exists(dotted: str) -> bool:
        """A module, or a name inside one: `ps.client` or `ps.client.client.PSClient.pull`."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            path = ROOT.joinpath(*parts[:end])
            if path.with_suffix(".py").is_file() or (end == len(parts) and path.is_dir()):
                source = path.with_suffix(".py").read_text() if end < len(parts) else ""
                return all(re.search(rf"\b{name}\b", source) for name in parts[end:])
        return False

    missing = [name for name in MODULE.findall(document.read_text()) if not exists(name)]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(document):
    targets = [name for name in LINK.findall(document.read_text()) if "://" not in name]
    missing = [name for name in targets if not (document.parent / name).exists()]
    assert not missing


def _python_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_readme_has_a_program_of_about_fifteen_lines():
    program = next(block for block in _python_blocks() if "TFCluster.reserve" in block)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("block", _python_blocks())
def test_readme_code_compiles_and_imports_what_exists(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfos":
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("block", _python_blocks())
def test_readme_code_passes_keywords_that_exist(block):
    from tfos import TFCluster
    from tfos.worker.context import NodeContext

    methods = {"ctx": NodeContext, "cluster": TFCluster, "TFCluster": TFCluster}
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in methods:
                method = getattr(methods[owner.id], node.func.attr)
                known = inspect.signature(method).parameters
                takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
                unknown = {keyword.arg for keyword in node.keywords} - set(known)
                assert takes_any or not unknown, f"{node.func.attr}: {unknown}"


def test_the_table_of_faults_names_exactly_the_tests_that_there_are():
    text = (ROOT / "docs" / "faults.md").read_text()
    tests = faults_table.marked_tests()
    rows = {match[2] for match in faults_table.ROW.finditer(text)}
    assert not set(tests) - rows, "ids without a row"
    assert faults_table.filled(text, tests) == text, "run scripts/faults_table.py"
