"""The names that programs written for TensorFlowOnSpark use, with their keywords and defaults."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

import tfos
import tfos.errors
from tests.support.sources import ROOMS, tree
from tfos.monitor import reports

RUN = {
    "num_ps": inspect.Parameter.empty,
    "tensorboard": False,
    "input_mode": tfos.InputMode.TENSORFLOW,
    "log_dir": None,
    "driver_ps_nodes": False,
    "master_node": None,
    "reservation_timeout": 600,
    "queues": ("input", "output", "error"),
    "eval_node": False,
    "release_port": True,
}
CONTEXT = [
    *("job_name", "task_index", "executor_id", "num_workers", "is_chief", "cluster_spec"),
    *("defaultFS", "working_dir", "absolute_path", "get_data_feed", "dataset", "distribute"),
    *("export", "callbacks", "log_dir", "ps_client"),
]


def _defaults(method):
    return {name: p.default for name, p in inspect.signature(method).parameters.items()}


FACES = (*ROOMS, "tfos.keras")
RECEIVED = {
    *("TFCluster", "NodeContext", "Reading", "FileRows", "StreamTraining", "DataFeed"),
    *("TableClient", "TrainingBatch", "RankGroup", "PredictColumn", "ManyTrainings"),
}
"""Classes whose objects users receive: they do not call the constructors."""
MODULES_OF_TFOS = {"errors", "keras", "ml", "orca", "serving"}
"""There after `import tfos`; `from tfos import *` does not replace a program's `keras`."""
FUNCTIONS = ["tfos.dfutil", "ps.manifest.rule_spec"]
"""Modules whose functions users call by their module's name."""


def _public_callables() -> Iterator[tuple[str, Any, str]]:
    """Every function and method that users call: its name, itself, the docstring for its Args."""
    offered = [
        (f"{room}.{name}", getattr(importlib.import_module(room), name))
        for room in ROOMS
        for name in importlib.import_module(room).__all__
    ]
    for home in FUNCTIONS:
        found = vars(importlib.import_module(home)).items()
        offered += [
            (f"{home}.{name}", value)
            for name, value in found
            if inspect.isfunction(value) and value.__module__ == home and name[0] != "_"
        ]
    for name, value in offered:
        if inspect.isfunction(value):
            yield name, value, inspect.getdoc(value) or ""
        elif inspect.isclass(value) and not issubclass(value, Exception):
            yield from _methods_of(name, value)


def _methods_of(owner: str, kind: type) -> Iterator[tuple[str, Any, str]]:
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        method = getattr(method, "__func__", method)  # of classmethods
        if not inspect.isfunction(method) or method.__module__.partition(".")[0] not in ROOMS:
            continue
        if name == "__init__" and not is_dataclass(kind):  # records explain each field beside it
            yield f"{owner}.{name}", method, inspect.getdoc(kind) or ""
        elif name[0] != "_":
            yield f"{owner}.{name}", method, inspect.getdoc(method) or ""


def _parameters(function: Any) -> list[inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return [each for each in found if each.name not in ("self", "cls")]


PASSED_ON = {
    "tfos.Runner.run(**kwargs: 'Any')",
    "tfos.MirroredStrategyRunner.run(**kwargs: 'Any')",
}
"""Arguments of the user's function, in the shape that its users know."""


def test_public_calls_have_typed_signatures_without_catch_alls():
    loose = [
        f"{name}({parameter})"
        for name, function, _ in _public_callables()
        for parameter in _parameters(function)
        if parameter.kind is parameter.VAR_KEYWORD or parameter.annotation is parameter.empty
    ]
    assert set(loose) == PASSED_ON


def test_public_calls_of_two_or_more_parameters_document_each():
    missing = [
        f"{name}: {parameter.name}"
        for name, function, text in _public_callables()
        if len(_parameters(function)) > 1
        for parameter in _parameters(function)
        if not re.search(rf"^ +\*{{0,2}}(?:\w+, )*{parameter.name}(?:, \w+)*: ", text, re.MULTILINE)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("home", "method"),
    [
        ("tfos.worker.context.NodeContext", "dataset"),
        ("tfos.worker.context.NodeContext", "distribute"),
        ("tfos.reading.file_rows.FileRows", "dataset"),
        ("tfos.cluster.TFCluster", "train"),
        ("ps.client.client.PSClient", "push"),
    ],
)
def test_a_misspelt_keyword_is_a_type_error(home, method):
    module, _, name = home.rpartition(".")
    function = getattr(getattr(importlib.import_module(module), name), method)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'staleness_bond'"):
        function(None, staleness_bond=1)


def test_everything_that_is_offered_exists():
    assert {"TFCluster", "InputMode"} <= set(tfos.__all__)
    assert not [name for name in tfos.__all__ if not hasattr(tfos, name)]


@pytest.mark.parametrize("room", ["ps", "rpc", "feeding"])
def test_a_room_offers_its_names_by_itself(room):
    module = importlib.import_module(room)
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return tree(Path(spec.origin or ""))


@pytest.mark.parametrize("face", FACES)
def test_type_checkers_see_the_names_that_a_face_loads(face):
    module = importlib.import_module(face)
    seen = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if alias.asname else node.module
        for node in ast.walk(_tree(face))
        if isinstance(node, ast.ImportFrom) and node.col_offset
        for alias in node.names
    }
    loaded = {name: home.removesuffix(":") for name, home in module._HOMES.items()}
    assert seen == loaded
    not_by_star = MODULES_OF_TFOS if face == "tfos" else set()
    assert {*loaded} | {"__version__"} >= {*module.__all__} >= {*loaded} - not_by_star
    assert not {*module.__all__} & not_by_star


def _kinds_in(found: Any) -> Iterator[type]:
    """The classes of our rooms in an annotation's object, also inside unions and generics."""
    for part in typing.get_args(found):
        yield from _kinds_in(part)
    if isinstance(found, type) and found.__module__.partition(".")[0] in ROOMS:
        yield found


@functools.cache
def _imports_of(module: str) -> dict[str, tuple[str, str]]:
    """What a module imports by name, for type checkers too: (module, name) by local name."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _named_kinds(annotation: Any, home: str) -> Iterator[tuple[str, str]]:
    """Module and name of each class of ours in an annotation; imports no Keras for it."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    for node in ast.walk(ast.parse(text or "None", mode="eval")):
        if not isinstance(node, ast.Name):
            continue
        source, name = _imports_of(home).get(node.id, (home, node.id))
        if source.startswith("tfos.keras."):
            classes = [each for each in _tree(source).body if isinstance(each, ast.ClassDef)]
            yield from ((source, name) for each in classes if each.name == name)
        elif source.partition(".")[0] in ROOMS:
            found = getattr(importlib.import_module(source), name, None)
            yield from ((kind.__module__, kind.__qualname__) for kind in _kinds_in(found))


def _annotations() -> Iterator[tuple[str, Any, str]]:
    """Annotations that users read in the faces: where, the annotation, the module that has it."""
    for name, function, _ in _public_callables():
        owner, _, method = name.rpartition(".")
        is_received = method == "__init__" and owner.rpartition(".")[2] in RECEIVED
        if not is_received:
            yield from (
                (name, each, function.__module__) for each in function.__annotations__.values()
            )
    for room in ROOMS:
        face = importlib.import_module(room)
        for name in face.__all__:
            for base in getattr(getattr(face, name), "__mro__", ()):
                if base.__module__.partition(".")[0] in ROOMS and base not in ERRORS:
                    yield from ((f"{room}.{name}", each, base.__module__) for each in _fields(base))


def _fields(kind: type) -> Iterator[Any]:
    """Annotations of a class's public attributes and properties."""
    for name, annotation in vars(kind).get("__annotations__", {}).items():
        if name[0] != "_":
            yield annotation
    for name, value in vars(kind).items():
        if isinstance(value, property) and name[0] != "_" and value.fget is not None:
            yield value.fget.__annotations__.get("return")


ERRORS = {kind for kind in vars(tfos.errors).values() if isinstance(kind, type)}


def test_every_class_in_a_public_signature_can_be_imported_from_a_face():
    faces = [importlib.import_module(face) for face in FACES]
    offered = {(home, name) for face in faces for name, home in face._HOMES.items()}
    modules = {home.removesuffix(":") for home, _ in offered if home.endswith(":")}
    hidden = {
        f"{where}: {home}.{name}"
        for where, annotation, module in _annotations()
        for home, name in _named_kinds(annotation, module)
        if (home, name) not in offered and home not in modules and home != "tfos.errors"
    }
    assert not hidden


def test_every_error_is_in_one_tree_that_tfos_errors_shows():
    homes = ("rpc.errors", "ps.errors", "feeding.errors", "tfos.errors")
    kinds = {
        kind
        for home in map(importlib.import_module, homes)
        for kind in vars(home).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ in homes
    }
    outside = {
        tfos.errors.RemoteTraceback,
        tfos.errors.FeedEndedWarning,
        tfos.errors.RowsReadAheadWarning,
        tfos.errors.SortedRowsWarning,
    }
    assert not [kind for kind in kinds - outside if not issubclass(kind, tfos.errors.TFOSError)]
    assert {kind.__name__ for kind in kinds} <= set(tfos.errors.__all__)
    settings = [kind for kind in kinds if kind.__name__.endswith("SettingsError")]
    assert len(settings) == 3
    assert all(issubclass(kind, tfos.errors.SettingsError) for kind in settings)
    assert issubclass(tfos.errors.SettingsError, ValueError)


def test_run_takes_the_known_keywords_in_their_order():
    parameters = _defaults(tfos.TFCluster.run)
    assert list(parameters)[:5] == ["sc", "map_fun", "tf_args", "num_executors", "num_ps"]
    found = {name: parameters[name] for name in RUN}
    assert {**found, "queues": tuple(found["queues"])} == RUN
    assert list(parameters)[4 : 4 + len(RUN)] == list(RUN)


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        ("train", {"num_epochs": 0, "feed_timeout": 600, "qname": "input"}),
        ("inference", {"feed_timeout": 600, "qname": "input"}),
        ("shutdown", {"ssc": None, "grace_secs": 0, "timeout": 259200}),
    ],
)
def test_methods_take_the_known_keywords(method, keywords):
    parameters = _defaults(getattr(tfos.TFCluster, method))
    assert {name: parameters[name] for name in keywords} == keywords
    assert method == "shutdown" or list(parameters)[1] == "dataRDD"


@pytest.mark.parametrize("method", ["reserve", "start", "status", "tensorboard_url", "__enter__"])
def test_the_cluster_has(method):
    assert callable(getattr(tfos.TFCluster, method))


def test_input_modes_are_reachable_both_ways_and_keep_their_numbers():
    assert tfos.TFCluster.InputMode is tfos.InputMode
    assert (tfos.InputMode.TENSORFLOW, tfos.InputMode.SPARK) == (0, 1)


def test_the_context_has_the_known_members():
    from tfos.worker.context import NodeContext

    source = inspect.getsource(NodeContext.__init__)
    missing = [
        name for name in CONTEXT if not (hasattr(NodeContext, name) or f"self.{name} = " in source)
    ]
    assert not missing


def test_data_feed_has_the_known_methods():
    from feeding.receiver.data_feed import DataFeed

    for name in ("next_batch", "should_stop", "batch_results", "terminate"):
        assert callable(getattr(DataFeed, name))
    parameters = _defaults(DataFeed.__init__)
    wanted = {"train_mode": True, "qname_in": "input", "qname_out": "output", "input_mapping": None}
    assert {name: parameters[name] for name in wanted} == wanted


def _public_records() -> Iterator[type[Any]]:
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and (is_dataclass(value) or issubclass(value, Struct)):
                yield value
    for value in vars(reports).values():
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == reports.__name__:
            yield value


def _texts_below_fields(record: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text, on one line, of each field of a record that has a text."""
    body = _tree(record.__module__).body
    (found,) = (
        each for each in body if isinstance(each, ast.ClassDef) and each.name == record.__name__
    )
    for field, text in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):  # noqa: SIM102
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                yield field.target.id, " ".join(str(text.value.value).split())


def test_help_of_every_public_record_shows_the_texts_of_its_fields():
    seen = 0
    for record in _public_records():
        texts = list(_texts_below_fields(record))
        shown = (inspect.getdoc(record) or "") if texts else ""
        for field, text in texts:
            seen += 1
            assert f"{field}: {text}" in shown, record
    assert seen > 60
