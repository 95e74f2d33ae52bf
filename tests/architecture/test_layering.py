"""The shape of the code is a rule: what rooms and packages may import, how large they may grow."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.test_groups import GROUPS, names_for
from tests.support.sources import IDS, MODULES, ROOMS, ROOT, dotted, nodes, tree

NAMED_FOR_SPARK = "pyspark_tfrecord"  # one name that Spark looks for; no room
MAY_IMPORT = {
    "rpc": {"rpc", "msgspec", "numpy", "numba", "cryptography"},
    "ps": {"ps", "rpc", "msgspec", "numpy", "numba", "llvmlite", "prometheus_client"},
    "feeding": {
        *("feeding", "rpc", "msgspec", "numpy", "numba", "llvmlite"),
        *("fsspec", "hdfs_native", "pyarrow"),
    },
    "tfos": {
        *(
            "tfos",
            "ps",
            "feeding",
            "rpc",
            "msgspec",
            "numpy",
            "cloudpickle",
            "cryptography",
            "grpc",
        ),
        *(
            "keras",
            "optree",
            "prometheus_client",
            "psutil",
            "pyarrow",
            "pyspark",
            "rich",
            "tensorboard",
        ),
        *("IPython", "elftools", "starlette", "tensorflow", "typer", "uvicorn"),
    },
}
LEVELS = {
    "rpc": (
        ("array_bytes", "field_texts", "linux_calls", "printable", "process_stat"),
        ("endpoint", "errors", "histogram", "jit", "lazy", "limits"),
        ("auth", "descriptors", "process_id"),
        ("transport",),
        ("http_page", "wire"),
        ("client", "server"),
    ),
    "ps": (
        ("codec", "errors", "jit"),
        ("compression", "metadata", "string_ids"),
        ("manifest",),
        ("exactly_once", "optim", "stats"),
        ("consistency", "dense", "tables"),
        ("config", "kernels_ahead", "sorted_rows"),
        ("checkpoint",),
        ("protocol", "successor_watch"),
        ("client", "collector", "server"),
        ("cli",),
    ),
    "feeding": (
        ("errors",),
        ("config",),
        ("columnar", "filesystem", "formats.kernel_cache"),
        ("encode", "protocol", "reading"),
        ("arrow", "formats.text", "formats.tfrecord", "receiver"),
        ("formats.csv", "formats.parquet", "sender"),
    ),
    "tfos": (
        (
            *("console", "failure", "fit_place", "import_check", "metric_direction"),
            *("native.at_import", "version"),
        ),
        ("errors",),
        ("tls_channel",),
        (
            "files",
            "native.legacy_keras",
            "node_memory",
            "phases",
            "tls_server",
            "topology",
        ),
        ("collectives", "config", "datasource", "keras"),
        ("control", "keras.data", "keras.embedding"),
        ("keras.step", "monitor", "node", "reading", "serving", "spark"),
        ("watch",),
        ("slots",),
        ("dfutil", "driver", "keras.fit", "native", "node.supervisor"),
        ("feed", "worker"),
        ("doctor", "many", "predict", "streaming", "submit", "timeseries"),
        ("cluster",),
        ("runner", "tensorflowonspark"),
        ("estimators",),
        ("ml", "orca", "tensorflowonspark"),
        ("bench", "pack"),
        ("cli",),
    ),
}
"""Packages, and modules that stand beside them: each imports from the levels above its own only."""
MAX_FILES = 15
"""A package with more is two packages."""
IN_FUNCTIONS_ONLY = {
    *("IPython", "elftools", "fsspec", "hdfs_native", "keras", "prometheus_client"),
    *("pyspark", "starlette", "tensorboard", "tensorflow", "uvicorn"),
}
# these own their process and its logging
OWN_PROCESS = {"ps/cli/serve.py", "tfos/node/child_log.py"}
LOADED_BY_USERS = {
    "ml": "pyspark",  # by programs that use spark.ml
    "keras": "keras",  # by ctx.distribute, after the user's own import
    "runner.log_callback": "keras",
    "watch.page_app": "starlette",  # with the extra `page`, where a page is asked for
    "watch.page_server": "uvicorn",
    "pack.binaries": "elftools",  # with the extra `pack`, by the command
    "datasource": "pyspark",  # by Spark itself
    "tensorflowonspark.params": "pyspark",  # by programs that use spark.ml
    "tensorflowonspark.pipeline": "pyspark",
}
MAX_FUNCTION_LINES = 60
NAMED_BY_ITS_USERS = "tfos/tensorflowonspark/util.py"
"""The name that programs import; what is there has no other home."""
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow"}
MAY_LOOK = {
    # age of a restored cut; a number above lost ones; when a run begins; what is
    # compared between hosts; the name of an export; whether a token has ended
    *("ps/server/handlers.py", "ps/server/save_restore.py", "ps/checkpoint/fencing.py"),
    *("tfos/doctor/collection.py", "tfos/watch/doors.py"),
    *("tfos/tensorflowonspark/estimator_stand_in.py", "feeding/filesystem/hdfs/credentials.py"),
}


def every_module(rule: Callable[[Path], None]) -> Callable[[], None]:
    """Make a rule for one module the test of all: a case for each would take most of its time."""

    def test() -> None:
        broken: dict[str, str] = {}
        for name, path in zip(IDS, MODULES, strict=True):
            try:
                rule(path)
            except AssertionError as error:
                broken[name] = str(error)
        assert not broken

    test.__name__ = rule.__name__
    return test


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    else:
        assert node.level == 0, f"relative import at line {node.lineno}"
        yield (node.module or "").split(".")[0]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def _imports(parent: ast.AST, at_module_level: bool) -> Iterator[tuple[str, int]]:
    """Imported top-level names with their line; imports for type checkers only are not imports."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((name, node.lineno) for name in _names(node))
        elif _is_type_checking(node):
            continue
        elif not (at_module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from _imports(node, at_module_level)


def test_all_four_rooms_have_modules():
    assert {_room(path) for path in MODULES} == set(ROOMS)


@pytest.mark.slow
@every_module
def test_arrows_only_point_down(path):
    allowed = MAY_IMPORT[_room(path)] | set(sys.stdlib_module_names)
    wrong = [(name, line) for name, line in _imports(tree(path), False) if name not in allowed]
    assert not wrong, f"{_room(path)} may not import these (name, line): {wrong}"


def _unit(parts: tuple[str, ...]) -> str | None:
    """Return the entry of LEVELS that a module belongs to: the longest that fits its name."""
    room, *rest = parts
    known = {unit for level in LEVELS[room] for unit in level}
    fitting = (".".join(rest[:end]) for end in range(len(rest), 0, -1))
    return next((unit for unit in fitting if unit in known), None)


def _own_imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of its own room that a module imports, in functions too."""
    room = _room(path)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (tuple(name.split(".")) for name in names if name.startswith(f"{room}."))


@pytest.mark.slow
@every_module
def test_packages_import_lower_levels_only(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] in ("__init__", "__main__"):
        return  # a face is lazy, and a command is above all
    unit = _unit(parts)
    assert unit, "belongs to no package of LEVELS"
    level = {name: at for at, names in enumerate(LEVELS[parts[0]]) for name in names}
    wrong = {
        ".".join(name)
        for name in _own_imports(path)
        if (other := _unit(name)) and other != unit and level[other] >= level[unit]
    }
    assert not wrong, f"{unit} may not import these"


def test_packages_have_a_docstring_and_few_files():
    wrong: dict[str, str] = {}
    for directory in {path.parent for path in MODULES}:
        name = str(directory.relative_to(ROOT))
        files = [path for path in directory.glob("*.py") if path.name != "__init__.py"]
        if len(files) > MAX_FILES:
            wrong[name] = f"{len(files)} files"
        elif not (directory / "__init__.py").exists():
            wrong[name] = "no __init__.py"
    assert not wrong


def test_no_class_name_stands_for_two_things():
    homes: dict[str, list[str]] = {}
    for name, path in zip(IDS, MODULES, strict=True):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}


@every_module
def test_heavy_packages_are_imported_inside_functions(path):
    subpackage = path.relative_to(ROOT).parts[1]
    heavy = IN_FUNCTIONS_ONLY
    if path.name != "__init__.py":
        heavy = heavy - {LOADED_BY_USERS.get(subpackage, "")}
        heavy = heavy - {LOADED_BY_USERS.get(f"{subpackage}.{path.stem}", "")}
    found = [(name, line) for name, line in _imports(tree(path), True) if name in heavy]
    assert not found, f"import these inside the function that needs them (name, line): {found}"


@every_module
def test_modules_are_documented_and_functions_stay_small(path):
    assert ast.get_docstring(tree(path)), "a module says what it covers"
    long = [
        f"{node.name}, line {node.lineno}"
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


@every_module
def test_nothing_asks_pyarrow_for_pandas(path):
    """The older supported ones import it then, and nothing installs pandas."""
    assert ".to_pandas" not in path.read_text()


@every_module
def test_calls_that_some_pythons_lack_are_made_by_one_module(path):
    """A call of os.pidfd_open would fail on uv's and conda's; see rpc/linux_calls.py."""
    made = re.search(
        r"\b(os\.(memfd_create|pidfd_open|P_PIDFD|MFD_)|signal\.pidfd_)", path.read_text()
    )
    assert not made or path.name == "linux_calls.py"


@every_module
def test_grpc_is_imported_by_the_module_that_sets_its_log_level(path):
    """It reads the level at its first import: one before that lets strangers fill the log."""
    assert path.name == "tls_channel.py" or "grpc" not in dict(_imports(tree(path), False))


@every_module
def test_no_module_without_a_subject(path):
    if str(path.relative_to(ROOT)) == NAMED_BY_ITS_USERS:
        return
    assert not BANNED_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)


def _lines_of_main(path: Path) -> set[int]:
    return {
        line
        for node in tree(path).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


@every_module
def test_library_code_neither_prints_nor_exits(path):
    as_main = _lines_of_main(path)
    calls = [
        (dotted(node.func), node.lineno)
        for node in nodes(path)
        if isinstance(node, ast.Call) and node.lineno not in as_main
    ]
    banned = {"print", "sys.exit", "exit", "quit", "logging.basicConfig", "signal.alarm"}
    if str(path.relative_to(ROOT)) in OWN_PROCESS:
        banned -= {"logging.basicConfig"}
    assert not [call for call in calls if call[0] in banned]


SUPERVISOR = "import tfos.node.supervisor.supervisor, tfos.control.client"
BARE = "import tfos"
PROGRAM = "from tfos import ClusterConfig, TFCluster"
CLIENT = "import ps.client.client"
FACE = "import tfos, tfos.cluster, tfos.worker.context"
SERVER = "import ps.server.server, tfos.node.ps_process"
DATA_SOURCE = f"import {NAMED_FOR_SPARK}"


@functools.cache
def _loaded() -> dict[str, set[str]]:
    """Return the packages in a process after each of these, one after the other.

    What is not loaded after several is loaded by none of them, so one process tells of all.
    """
    code = (
        "import json, sys\nfound = {}\n"
        "for statement in sys.argv[1:]:\n"
        "    exec(statement)\n"
        "    found[statement] = sorted({name.split('.')[0] for name in sys.modules})\n"
        "print(json.dumps(found))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, BARE, PROGRAM, SUPERVISOR, CLIENT, FACE, SERVER, DATA_SOURCE],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    return {statement: set(names) for statement, names in json.loads(result.stdout).items()}


def test_import_tfos_loads_no_package_of_others_and_none_of_ours_but_its_own():
    """It takes 4 ms, which each node process pays as well."""
    packages = {*MAY_IMPORT, *itertools.chain(*MAY_IMPORT.values())} - {"tfos", "rpc"}
    assert not packages & _loaded()[BARE]


def test_a_driver_program_begins_without_numpy_and_what_takes_seconds():
    assert not (IN_FUNCTIONS_ONLY | {"numba", "numpy", "pyarrow"}) & _loaded()[PROGRAM]


@pytest.mark.slow
def test_a_supervisor_stays_small():
    assert not (IN_FUNCTIONS_ONLY | {"numba", "numpy"}) & _loaded()[SUPERVISOR]


def test_a_client_of_dense_parameters_does_not_load_numba():
    assert "numba" not in _loaded()[CLIENT]


def test_import_tfos_loads_neither_tensorflow_nor_pyspark():
    assert not IN_FUNCTIONS_ONLY & _loaded()[FACE]


def test_a_parameter_server_process_loads_neither_tensorflow_nor_pyspark():
    assert not IN_FUNCTIONS_ONLY & _loaded()[SERVER]


def test_only_the_command_knows_the_benchmarks():
    knowing = {
        name
        for name, path in zip(IDS, MODULES, strict=True)
        if "tfos.bench" in path.read_text() and not name.startswith("tfos/bench/")
    }
    assert knowing == {"tfos/cli/main.py"}


def test_what_spark_looks_for_is_one_name_and_loads_no_tensorflow():
    (module,) = (ROOT / NAMED_FOR_SPARK).rglob("*.py")

    assert {name for name, _ in _imports(ast.parse(module.read_text()), False)} == {"tfos"}
    assert not {"keras", "tensorflow", "hdfs_native"} & _loaded()[DATA_SOURCE]


def test_every_test_file_is_collected_by_a_group():
    """Each test of a collected file is in exactly one group: tests/conftest.py refuses others."""
    folders = tuple(f"{path}/" for group in GROUPS for path in group.paths)
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")]
    assert files
    assert [file for file in files if not file.startswith(folders)] == []


def test_only_the_tests_of_keras_import_it_when_they_are_collected():
    """A group imports all files of its folders, whatever it selects of them; Keras takes 4 s."""
    by_keras = {path.stem for path in (ROOT / "tests/support").glob("*.py") if _imports_keras(path)}
    assert by_keras
    importing = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if _imports_keras(file, *by_keras)
    }
    assert importing
    assert [file for file in importing if not file.startswith("tests/system/keras/")] == []


def _imports_keras(path: Path, *modules_of_support: str) -> bool:
    """Whether the module does so itself, or by one of these; ast takes 2 s for all tests."""
    of_support = "".join(rf"|tests\.support\.{name}" for name in modules_of_support)
    pattern = rf'^(import |from |\w+ = pytest\.importorskip\(")(keras|tensorflow{of_support})\b'
    return re.search(pattern, path.read_text(), re.MULTILINE) is not None


def test_a_test_without_a_group_is_seen():
    assert names_for("tests/ps/test_x.py", set()) == ["unit"]
    assert names_for("tests/ps/test_x.py", {"slow", "fault"}) == ["sockets"]
    assert names_for("tests/ps/test_x.py", {"long", "hdfs"}) == ["long"]
    assert names_for("tests/ps/test_x.py", {"hdfs"}) == []
    assert names_for("tests/elsewhere/test_x.py", set()) == []


@pytest.mark.fault("F53")
def test_no_wait_and_no_sign_of_life_looks_at_the_wall_clock():
    looking = {
        name
        for name, path in zip(IDS, MODULES, strict=True)
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and dotted(node) in WALL_CLOCK
    }
    assert looking == MAY_LOOK
