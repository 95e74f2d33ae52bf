"""What the documents say exists: paths, modules, links, code, pages, the table of faults."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from feeding.protocol import messages as feeding
from ps.protocol import messages as ps
from scripts import faults_table, protocol_tables
from scripts.docs_site.pages import ROOT_PAGES
from tests.support.names import exists
from tfos.control import codec
from tfos.control import messages as control

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
ROOMS = {"rpc", "ps", "feeding", "tfos"}
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


def test_documents_that_the_code_names_exist():
    named = {
        (str(path.relative_to(ROOT)), name)
        for room in sorted(ROOMS)
        for path in (ROOT / room).rglob("*.py")
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())
    }
    assert len(named) > 15
    assert not [place for place in sorted(named) if not (ROOT / place[1]).is_file()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_named_modules_exist(document):
    missing = [name for name in MODULE.findall(document.read_text()) if not exists(name)]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(document):
    targets = [name for name in LINK.findall(document.read_text()) if "://" not in name]
    missing = [name for name in targets if not (document.parent / name).exists()]
    assert not missing


def _python_blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for document, name in zip(DOCUMENTS, IDS, strict=True)
    for number, block in enumerate(_python_blocks(document))
]


def test_the_readme_has_a_program_of_about_fifteen_lines():
    program = next(b for b in _python_blocks(ROOT / "README.md") if "TFCluster.reserve" in b)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("block", BLOCKS)
def test_shown_code_compiles_and_imports_what_exists(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOMS:
            module = importlib.import_module(node.module or "")
            assert {alias.name for alias in node.names} <= {*dir(module)}  # loads no Keras


def test_the_commands_of_an_example_are_the_same_in_its_file_and_in_its_help():
    for path in ROOT.glob("examples/**/*.py"):  # a backslash that Python takes ends no line of them
        source = path.read_text()
        assert (ast.get_docstring(ast.parse(source), clean=False) or "") in source, path


def _owners() -> dict[str, type]:
    """What the variables of the documents' programs are, by the names that they always have."""
    from ps import PSClient
    from tfos import TFCluster
    from tfos.reading.reading import Reading
    from tfos.worker.context import NodeContext

    return {
        "ctx": NodeContext,
        "ctx.read": Reading,
        "client": PSClient,
        "cluster": TFCluster,
        "TFCluster": TFCluster,
    }


def _calls(source: str) -> list[tuple[str, str, set[str | None]]]:
    """Every call in a program as (owner, method, keywords)."""
    return [
        (ast.unparse(node.func.value), node.func.attr, {each.arg for each in node.keywords})
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


def _programs() -> dict[str, str]:
    blocks = {
        f"{document.relative_to(ROOT)}#{at}": block
        for document in DOCUMENTS
        for at, block in enumerate(_python_blocks(document))
    }
    files = {
        str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("examples/**/*.py")
    }
    return {**blocks, **files}


def test_code_in_documents_and_examples_calls_methods_and_keywords_that_exist():
    owners = _owners()
    wrong, checked = [], 0
    for place, source in _programs().items():
        for owner, method, keywords in _calls(source):
            if owner not in owners:
                continue
            function = getattr(owners[owner], method, None)
            if function is None:
                wrong.append(f"{place}: {owner}.{method}")
                continue
            checked += 1
            known = inspect.signature(function).parameters
            wrong += [
                f"{place}: {owner}.{method}({each}=)" for each in keywords - set(known) if each
            ]
    assert not wrong
    assert checked > 50


def test_code_in_documents_and_examples_finds_in_tfos_what_it_does_not_import():
    import tfos

    wrong, checked = [], 0
    for place, source in _programs().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tfos":
                checked += 1
                if node.attr not in dir(tfos) and f"import tfos.{node.attr}" not in source:
                    wrong.append(f"{place}: tfos.{node.attr}")
    assert not wrong
    assert checked > 5


def _public_calls() -> dict[str, Any]:
    """What the text calls, by the names that it has there: those of the programs, and tfos' own."""
    import tfos

    owned = {
        f"{owner}.{name}": getattr(kind, name)
        for owner, kind in _owners().items()
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    # `reserve(…)` and the like are the cluster's.
    bare = {
        name.split(".")[1]: call for name, call in owned.items() if name.startswith("TFCluster.")
    }
    public = {name: getattr(tfos, name) for name in tfos.__all__ if callable(getattr(tfos, name))}
    return {**bare, **public, **owned}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_calls_in_the_text_have_keywords_that_exist(document):
    calls, wrong = _public_calls(), []
    for code in re.findall(r"`([^`\n]+\([^`\n]*=[^`\n]*\))`", document.read_text()):
        try:
            nodes = list(ast.walk(ast.parse(code.replace("…", "..."))))
        except SyntaxError:  # no whole call
            continue
        for node in nodes:
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in calls:
                continue
            known = inspect.signature(calls[ast.unparse(node.func)]).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
                wrong += [code for each in node.keywords if each.arg and each.arg not in known]
    assert not wrong


def test_every_page_has_a_place_in_the_navigation_of_the_site():
    settings = (ROOT / "mkdocs.yml").read_text()
    here = set(re.findall(r"^ +- (?:.*: )?([\w./-]+\.md)$", settings, re.MULTILINE))
    decisions = {page for page in here if page.startswith("decisions/")}
    assert not decisions, "decisions are listed by scripts/docs_site/hooks.py"
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages |= set(ROOT_PAGES.values())
    assert here == {page for page in pages if not page.startswith("decisions/")}
    assert re.search(r"^ +- Decisions: decisions/", settings, re.MULTILINE)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_the_reference_has_every_public_name(room):
    reference = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    public = importlib.import_module(room).__all__
    shown = set(re.findall(rf"^::: {room}\.(\w+)$", reference, re.MULTILINE))
    named = set(re.findall(r"`(\w+)`", reference))  # errors are shown by their module
    assert {name for name in public if name != "__version__"} <= shown | named


FACES = ("tfos.keras", "tfos.ml", "tfos.orca", "tfos.runner", "tfos.serving", "tfos.timeseries")
"""Packages inside a room that programs import from."""


@pytest.mark.parametrize("face", FACES)
def test_the_reference_has_every_public_name_of_a_package_inside_a_room(face):
    reference = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    public = importlib.import_module(face).__all__
    shown = set(re.findall(rf"^::: (?:tfos|{re.escape(face)})\.(\w+)$", reference, re.MULTILINE))
    of_modules = rf"^::: {re.escape(face)}\.\w+\n.*members: \[(.*?)\]"
    for members in re.findall(of_modules, reference, re.MULTILINE):
        shown |= set(members.split(", "))
    assert set(public) <= shown


ENTRY = re.compile(r"^::: ([\w.]+)\.(\w+)\n((?: +.*\n)*)", re.MULTILINE)


def _shown_classes() -> list[tuple[str, Any, str]]:
    """Every class of a room on a page of the reference: its name, itself, its entry's options."""
    text = "\n".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    found = [
        (f"{module}.{name}", getattr(importlib.import_module(module), name, None), options)
        for module, name, options in ENTRY.findall(text)
        if module in ROOMS  # the packages below them load Keras
    ]
    return [each for each in found if inspect.isclass(each[1])]


def _fields_without_text(kind: type) -> list[str]:
    """Public fields of a class without a docstring below them, as its source has them."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    statements = [*typing.cast("ast.ClassDef", body).body, None]
    return [
        ast.unparse(field.target)
        for field, below in itertools.pairwise(statements)
        if isinstance(field, ast.AnnAssign)
        and not ast.unparse(field.target).startswith("_")
        and not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    ]


def test_the_reference_shows_the_fields_of_a_struct_whose_constructor_it_cannot_show():
    structs = [each for each in _shown_classes() if issubclass(each[1], msgspec.Struct)]
    assert len(structs) > 15
    hidden = {
        name: fields
        for name, kind, options in structs
        if "show_if_no_docstring: true" not in options and (fields := _fields_without_text(kind))
    }
    assert not hidden


SETTINGS = ("ClusterConfig", "Checkpoints", "Resources", "Restarts", "InputFiles")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_reference_has_nothing_of_a_record_of_settings_but_the_settings(name):
    ((kind, options),) = [each[1:] for each in _shown_classes() if each[0] == f"tfos.{name}"]
    filters = re.search(r"filters: (\[.*\])", options)
    hides = [at.removeprefix("!") for at in ast.literal_eval(filters[1])] if filters else ["^_"]
    fields = {each.name for each in dataclasses.fields(kind)}
    shown = {each for each in vars(kind) if not any(re.search(at, each) for at in hides)}
    assert shown == fields


NOT_FOR_PROGRAMS = {
    "TFCluster": {"InputMode", "handed_over"},  # a public name of tfos; by `train(dstream)`
    "NodeContext": {
        *("check_servers_used", "hand_over", "new_ps_client", "report_numbers"),
        *("resumes_epochs", "resumes_rate", "save_now", "send_output"),
    },
}


@pytest.mark.parametrize(("page", "name"), [("tfos", "TFCluster"), ("context", "NodeContext")])
def test_the_reference_lists_every_member_of_a_class_that_it_orders(page, name):
    import tfos

    text = (ROOT / f"docs/reference/{page}.md").read_text()
    ordered = re.findall(
        rf"^::: tfos.{name}\n(?: +.*\n)*?      members:\n((?: +- .*\n)+)", text, re.M
    )
    (listed,) = (re.findall(r"- (\w+)", each) for each in ordered)
    public = {each for each in dir(getattr(tfos, name)) if not each.startswith("_")}
    assert sorted(listed) == sorted(public - NOT_FOR_PROGRAMS[name])


def test_the_table_of_faults_names_exactly_the_tests_that_there_are():
    text = (ROOT / "docs" / "faults.md").read_text()
    tests = faults_table.marked_tests()
    rows = {match[2] for match in faults_table.ROW.finditer(text)}
    assert not set(tests) - rows, "ids without a row"
    assert faults_table.filled(text, tests) == text, "run scripts/faults_table.py"


def test_the_page_of_the_protocol_has_every_message_as_it_is():
    text = protocol_tables.PAGE.read_text()
    on_page = {match[2] for match in protocol_tables.TABLE.finditer(text)}
    assert on_page == set(protocol_tables.TABLES)
    assert protocol_tables.filled(text) == text, "run python -m scripts.protocol_tables"


def test_every_order_event_and_request_is_on_the_page_of_the_protocol_with_its_fields():
    page = protocol_tables.PAGE.read_text()
    text = "".join(match[0] for match in protocol_tables.TABLE.finditer(page))
    unions = (control.Order, control.Event, feeding.Request, ps.Request)
    for message in (each for union in unions for each in typing.get_args(union)):
        name = message.__struct_config__.tag
        (row,) = re.findall(rf"^\| `{name}` \|.*?\|", text, re.MULTILINE)
        fields = {field.encode_name for field in msgspec.structs.fields(message)}
        assert set(re.findall(r"`(\w+)`", row)) == {name, *fields}


def test_every_call_of_the_control_plane_is_on_the_page_of_the_protocol():
    text = protocol_tables.PAGE.read_text()
    calls = codec.REGISTER, codec.HEARTBEAT, codec.REPORT, codec.LOG, codec.ORDERS
    for call in (*calls, codec.ASK):
        assert re.search(rf"^    {call} +\w+ +-> ", text, re.MULTILINE), call


def test_the_version_of_feed_messages_on_the_page_of_the_protocol_is_that_of_the_code():
    assert f"version in `Hello` is {feeding.VERSION}." in protocol_tables.PAGE.read_text()
