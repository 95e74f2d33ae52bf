"""How an end is put into words, and whose frames a traceback shows."""

import signal

import pytest

from tfos.errors import RankLost
from tfos.failure import NODE_SILENT, NodeFailure, NodeId, is_symptom
from tfos.node.failure import Exit, describe_exit, fatal_dump, type_name, user_traceback


@pytest.mark.parametrize(
    ("exit_code", "number", "words"),
    [
        (3, None, "ended with exit code 3"),
        (None, signal.SIGSEGV, "killed by SIGSEGV"),
        (None, 63, "killed by signal 63"),
        (None, signal.SIGKILL, "killed by SIGKILL"),
    ],
)
def test_the_end_of_a_process_is_named(exit_code, number, words):
    assert describe_exit(Exit(exit_code, number)) == words


@pytest.mark.fault("F05")
def test_an_oom_kill_says_what_to_raise():
    text = describe_exit(Exit(None, signal.SIGKILL), oom_kills=1)
    assert text.startswith("killed by SIGKILL, probably out of memory")
    assert "spark.executor.memoryOverhead" in text
    assert "memory" not in describe_exit(Exit(None, signal.SIGTERM), oom_kills=1)


def test_the_fatal_dump_begins_where_faulthandler_began():
    tail = [
        "step 1",
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x1:",
        '  File "x"',
    ]
    assert fatal_dump(tail).splitlines() == tail[1:]
    assert fatal_dump(["all is well"]) == ""


def call(source, name, inner=None):
    scope = {"inner": inner}
    exec(compile(source, name, "exec"), scope)
    return scope["run"]


def test_frames_that_called_the_user_are_left_out_and_deeper_ones_kept():
    library = call("def run(): raise OSError('deep')", "library.py")
    user = call("def run(): inner()", "user.py", library)
    ours = call("def run(): inner()", "ours.py", user)
    with pytest.raises(OSError, match="deep") as caught:
        ours()
    text = user_traceback(caught.value, frozenset({"ours.py", __file__}))
    assert "ours.py" not in text
    assert text.index("user.py") < text.index("library.py")
    assert text.endswith("OSError: deep\n")


def test_a_traceback_of_our_frames_alone_is_kept_and_causes_are_shown():
    def fail():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    text = user_traceback(caught.value, frozenset({__file__}))
    assert "KeyError: 'first'" in text
    assert "direct cause" in text
    assert __file__ in text


def test_an_exceptions_class_has_one_name_in_all_records():
    assert type_name(KeyError("x")) == "KeyError"
    assert type_name(RankLost("x")) == f"{RankLost.__module__}.RankLost"


def test_what_follows_from_another_end_is_no_cause():
    node = NodeId("worker", 0)
    types = (type_name(RankLost("x")), NODE_SILENT, "ValueError", "")
    found = [is_symptom(NodeFailure(node, "h", 1, error_type=each)) for each in types]
    assert found == [True, True, False, False]
