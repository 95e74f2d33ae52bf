"""No text of a user or a peer becomes a command or a variable of another process."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable

import msgspec
import pytest

from tests.support.sources import IDS, MODULES, dotted, nodes
from tfos.control import messages
from tfos.node.spec import NodeBundle, NodeSettings
from tfos.node.supervisor.children import child_env

SHELLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_shell", "pty.spawn", "commands.getoutput"),
}
PROGRAMS_WITH_A_SHELL = {"sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/env"}


def shells_in(module: Iterable[ast.AST]) -> list[str]:
    """Return the calls among the nodes of a module that a shell reads."""
    found: list[str] = []
    for node in module:
        if isinstance(node, ast.Constant) and node.value in PROGRAMS_WITH_A_SHELL:
            found.append(f"line {node.lineno}: {node.value!r}")
        if isinstance(node, ast.Call):
            has_shell = any(
                each.arg == "shell" and not is_false(each.value) for each in node.keywords
            )
            if has_shell or dotted(node.func) in SHELLS:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.attack("A25")
def test_library_code_calls_no_shell():
    found = {
        name: shells
        for name, path in zip(IDS, MODULES, strict=True)
        if (shells := shells_in(nodes(path)))
    }
    assert found == {}


@pytest.mark.attack("A25")
@pytest.mark.parametrize(
    "source",
    [
        "import os; os.system('ls')",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "subprocess.Popen(['sh', '-c', text])",
    ],
)
def test_a_shell_would_be_seen(source: str):
    assert shells_in(ast.walk(ast.parse(source)))


@pytest.mark.attack("A25")
def test_a_child_gets_the_environment_of_its_executor_and_sizes_alone():
    base = {"PATH": "/bin", "LD_PRELOAD": "of the executor's own"}
    env = child_env(base, threads=2, cores=1)
    assert {name: env[name] for name in base} == base
    added = {name for name in env if name not in base}
    assert all(name.endswith("_NUM_THREADS") or name.startswith("TF_") for name in added)


@pytest.mark.attack("A25")
def test_no_message_carries_variables_of_an_environment():
    structs = [each for each in vars(messages).values() if isinstance(each, type)]
    names = {
        field.name
        for each in structs
        if issubclass(each, msgspec.Struct)
        for field in msgspec.structs.fields(each)
    }
    for kind in (NodeBundle, NodeSettings):
        names |= {field.name for field in dataclasses.fields(kind)}
    assert not [name for name in names if "env" in name.split("_")]
