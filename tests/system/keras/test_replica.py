"""Variables that share memory with what arrived: nothing that somebody kept changes under him."""

import gc
import sys
import threading
import tracemalloc
import weakref
from typing import Literal

import keras
import numpy as np
import pytest

from tfos.keras.aligned_memory import ALIGNMENT
from tfos.keras.step.exchange.replica import MAX_SHARED, Replica
from tfos.keras.step.variables import VariableGroup, raw_bytes

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

ALIGNED = [(8, 16), (16,), (32, 4)]
ODD = [(3,), (5, 5), (), (16,), (0, 4), (1,)]


def make_group(shapes, dtype="float32", *, trainable=True):
    variables = tuple(keras.Variable(np.zeros(shape), dtype=dtype) for shape in shapes)
    names = tuple(map(str, range(len(shapes))))
    name = "trainable" if trainable else "statistics"
    flat: Literal["float32", "float64"] = "float64" if dtype == "float64" else "float32"
    return VariableGroup(name, flat, variables, names, trainable=trainable, decays=False)


def values_of(group, turn):
    return np.arange(sum(group.sizes), dtype=group.dtype) / 7 + turn


def receive(replica, groups, turn, **options):
    """One step's answer: taken, filled, adopted, given back."""
    received = replica.take()
    for group in groups:
        received.arrays[group.name][:] = values_of(group, turn)
    replica.adopt(received, turn, **options)
    replica.give(received)
    return received


def parts(group, flat):
    cut = np.split(flat, np.cumsum(group.sizes)[:-1])
    return [part.reshape(v.shape) for part, v in zip(cut, group.variables, strict=True)]


def as_bytes(values):
    return (values.numpy() if tf.is_tensor(values) else values).tobytes()


def address(tensor):
    return np.asarray(memoryview(tensor)).ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_values_that_seed_the_servers_are_copied_once(dtype):
    group = make_group([(1 << 20,), (), (0, 4), (3, 5)], dtype)
    given = values_of(group, 1) % 64
    for variable, part in zip(group.variables, parts(group, given), strict=True):
        variable.assign(part)
    group.values()  # what the first call imports and makes
    tracemalloc.start()
    try:
        values = group.values()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert values.dtype == group.dtype
    kept = np.concatenate([np.ravel(np.asarray(v.value, group.dtype)) for v in group.variables])
    np.testing.assert_array_equal(values, kept)
    assert peak_bytes < 1.2 * values.nbytes


@pytest.fixture
def optimizer():
    return keras.optimizers.SGD()


@pytest.mark.parametrize("shapes", [ALIGNED, ODD, [(7,)]])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_values_are_those_received_and_what_was_kept_stays(shapes, dtype, optimizer):
    group = make_group(shapes, dtype)
    replica = Replica([group], optimizer)
    kept = []
    for turn in range(MAX_SHARED + 4):
        receive(replica, [group], turn)
        cast = [tf.cast(part, dtype).numpy() for part in parts(group, values_of(group, turn))]
        expected = [part.tobytes() for part in cast]
        assert [variable.numpy().tobytes() for variable in group.variables] == expected
        assert int(optimizer.iterations) == turn
        read = [variable.value.read_value() for variable in group.variables]
        kept.append((expected, read))
        kept.append((expected, [tf.identity(variable.value) for variable in group.variables]))
        kept.append((expected, [np.asarray(variable.numpy()) for variable in group.variables]))
        if dtype != "bfloat16":
            kept.append((expected, [np.asarray(memoryview(tensor)) for tensor in read]))
    for expected, tensors in kept:
        assert [as_bytes(tensor) for tensor in tensors] == expected


def test_aligned_variables_are_the_received_memory(optimizer):
    group = make_group(ALIGNED)
    replica = Replica([group], optimizer)
    received = receive(replica, [group], 1)
    first = received.arrays["trainable"].ctypes.data
    assert first % ALIGNMENT == 0
    starts = first + 4 * np.cumsum([0, *group.sizes[:-1]])
    assert [address(v.value.read_value()) for v in group.variables] == list(starts)


def test_hundreds_of_small_variables_are_cut_by_one_operation():
    group = make_group([(3,), (5, 5), (1 << 12,), *[(8, 3), (8,)] * 100, (64, 64)])
    assign = tf.function(group.assign, autograph=False)
    flat = tf.TensorSpec([sum(group.sizes)], group.dtype)
    kinds = [op.type for op in assign.get_concrete_function(flat).graph.get_operations()]
    assert kinds.count("SplitV") == 2
    assert kinds.count("StridedSlice") == 4  # two runs of small variables, and two large ones


def test_two_buffers_serve_any_number_of_steps(optimizer):
    group = make_group(ALIGNED)
    replica = Replica([group], optimizer)
    seen = {id(receive(replica, [group], turn)) for turn in range(200)}
    assert len(seen) == 2
    assert len(replica._given) == 2


def test_kept_tensors_hold_a_bounded_number_of_buffers(optimizer):
    group = make_group(ALIGNED)
    replica = Replica([group], optimizer)
    kept = []
    for turn in range(50):
        receive(replica, [group], turn)
        kept.append(group.variables[1].value.read_value())
    assert len(replica._given) <= MAX_SHARED + 1
    for turn, tensor in enumerate(kept):
        np.testing.assert_array_equal(tensor, parts(group, values_of(group, turn))[1])
    kept.clear()
    del tensor
    gc.collect()
    receive(replica, [group], 50)
    assert sum(given.is_shared for given in replica._given) == 1


def test_a_buffer_under_way_is_not_handed_out_again(optimizer):
    group = make_group(ALIGNED)
    replica = Replica([group], optimizer)
    receive(replica, [group], 0)
    in_flight = [replica.take() for _ in range(3)]
    assert len({id(each) for each in in_flight}) == 3
    for turn, each in enumerate(in_flight):
        each.arrays["trainable"][:] = values_of(group, turn)
        replica.adopt(each, turn, statistics=False)
        replica.give(each)
        np.testing.assert_array_equal(group.values(), values_of(group, turn))
    assert replica.take() is not in_flight[-1], "the variables are its memory"


def test_a_buffer_that_receives_again_says_nothing_of_the_variables(optimizer):
    group = make_group([(3,)], "float16")  # which gets a copy
    replica = Replica([group], optimizer)
    adopted = receive(replica, [group], 1)
    assert not replica.changed_here()
    group.variables[0].assign([5, 5, 5])
    assert replica.changed_here() == group.variables[0].path
    group.variables[0].assign(values_of(group, 1))
    gc.collect()
    assert replica.take() is adopted
    adopted.arrays["trainable"][:] = 7
    assert not replica.changed_here()


@pytest.mark.parametrize("shapes", [ALIGNED, ODD, [(8, 16)], [(3,)]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_nobody_wrote_are_not_compared_once_they_are_held(
    shapes, dtype, optimizer, monkeypatch
):
    group = make_group(shapes, dtype)
    replica = Replica([group], optimizer)
    compared = []

    def noting(*given):
        compared.append(given)
        return raw_bytes(*given)

    monkeypatch.setattr("tfos.keras.step.exchange.replica.raw_bytes", noting)
    for turn in range(2):
        receive(replica, [group], turn)
        replica.hold_copies()
        assert not replica.changed_here()
    assert not compared, "the cost of predict does not grow with the weights"
    receive(replica, [group], 2)  # a step, behind which nothing holds
    assert not replica.changed_here()
    before = len(compared)
    assert not replica.changed_here()
    assert len(compared) == before
    assert before == 0 or (shapes, dtype) != (ALIGNED, "float32")


def _compiled(write, *, jit_compile):
    return lambda value: tf.function(write, jit_compile=jit_compile)(value)


@pytest.mark.parametrize("shapes", [ALIGNED, [(8, 16)], [(3,), (5, 5)]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda value: value.assign(value + 1),
        lambda value: value.assign_add(tf.ones_like(value)),
        lambda value: value[0].assign(value[0] + 1),
        lambda value: value.scatter_sub(tf.IndexedSlices(value[:1] + 1, [0])),
        *(
            _compiled(lambda value: value.assign_sub(tf.ones_like(value)), jit_compile=each)
            for each in (True, False)
        ),
    ],
)
def test_a_written_variable_is_told_wherever_its_memory_is(shapes, dtype, held, write, optimizer):
    group = make_group(shapes, dtype)
    replica = Replica([group], optimizer)
    receive(replica, [group], 1)
    if held:
        replica.hold_copies()
    variable = group.variables[-1]
    before = variable.numpy()
    write(variable.value)
    for _ in range(2):
        assert replica.changed_here() == variable.path
    variable.assign(before)
    assert not replica.changed_here()


def test_held_values_are_let_go_by_the_next_ones(optimizer):
    group = make_group([(3,), (5, 5)])
    replica = Replica([group], optimizer)
    receive(replica, [group], 1)
    replica.hold_copies()
    held = [weakref.ref(each) for each in replica._copies.values()]
    assert held
    receive(replica, [group], 2)
    gc.collect()
    assert not [each for each in held if each() is not None]


def test_values_are_compared_bit_by_bit_in_their_own_memory():
    values = keras.Variable([np.nan, 0.0]).value.read_value()
    assert np.shares_memory(raw_bytes(values), np.asarray(values))
    assert np.array_equal(raw_bytes(values), raw_bytes(np.array([np.nan, 0.0], "float32")))
    assert not np.array_equal(raw_bytes(values), raw_bytes(np.array([np.nan, -0.0], "float32")))
    half = keras.Variable([1.0, 2.0], dtype="bfloat16").value.read_value()
    dtype = half.dtype.as_numpy_dtype
    assert np.array_equal(raw_bytes(half), raw_bytes(np.array([1, 2], "float32"), dtype))
    assert np.array_equal(raw_bytes(half[1]), raw_bytes(np.array([2], "float32"), dtype))
    assert not raw_bytes(keras.Variable(np.empty((0, 4))).value.read_value()).size


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("shapes", [ALIGNED, [(4, 16)]])
def test_no_write_to_a_variable_reaches_what_others_kept(shapes, is_kept, optimizer):
    """The only tensor that still uses received memory may be written in place, and no other."""
    group = make_group(shapes)
    replica = Replica([group], optimizer)
    receive(replica, [group], 1)
    before = values_of(group, 1)
    for variable in group.variables[1:]:
        variable.assign(np.full(variable.shape, -1.0))
    last = group.variables[0]
    kept = [last.value.read_value(), last.numpy()] if is_kept else []
    last.value.assign_add(tf.ones(last.shape))
    tf.raw_ops.ResourceApplyGradientDescent(
        var=last.value.handle, alpha=0.5, delta=tf.ones(last.shape)
    )
    tf.raw_ops.ResourceScatterUpdate(
        resource=last.value.handle, indices=[0], updates=tf.zeros((1, *last.shape[1:]))
    )
    expected = parts(group, before)[0] + np.float32(1) - np.float32(0.5)
    expected[0] = 0
    np.testing.assert_array_equal(last.numpy(), expected)
    for each in kept:
        np.testing.assert_array_equal(each, parts(group, before)[0])
    for variable in group.variables[1:]:
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, -1.0))
    receive(replica, [group], 2)
    np.testing.assert_array_equal(group.values(), values_of(group, 2))
    for each in kept:
        np.testing.assert_array_equal(each, parts(group, before)[0])


def test_a_variable_that_took_the_memory_over_keeps_its_values(optimizer):
    group = make_group(ALIGNED)
    replica = Replica([group], optimizer)
    receive(replica, [group], 1)
    target = keras.Variable(np.zeros(ALIGNED[0]), dtype="float32")
    target.assign(group.variables[0])  # as a target network does: TensorFlow shares the memory
    for turn in range(2, 6):
        receive(replica, [group], turn)
    np.testing.assert_array_equal(target.numpy(), parts(group, values_of(group, 1))[0])
    target.value.assign_add(tf.ones(target.shape))
    for turn in range(6, 9):
        receive(replica, [group], turn)
        np.testing.assert_array_equal(group.values(), values_of(group, turn))
    np.testing.assert_array_equal(target.numpy(), parts(group, values_of(group, 1))[0] + 1)


def test_a_reader_that_has_the_gil_and_an_assignment_never_wait_for_each_other(optimizer):
    """An op that is given a variable reads it with the GIL, under the lock of the assignment."""
    group = make_group(ALIGNED)
    replica = Replica([group], optimizer)
    reads, is_over = [0], threading.Event()

    def read():
        while not is_over.is_set():
            tf.raw_ops.AddV2(x=group.variables[0].value, y=1.0)
            reads[0] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        for turn in range(200):
            receive(replica, [group], turn)
    finally:
        is_over.set()
        sys.setswitchinterval(before)
        reader.join(20)
    assert reads[0]
    assert not reader.is_alive()


def test_statistics_are_copied_and_may_be_left_alone(optimizer):
    trainable, statistics = make_group(ALIGNED), make_group(ALIGNED, trainable=False)
    groups = [trainable, statistics]
    replica = Replica(groups, optimizer)
    received = receive(replica, groups, 1)
    flat = received.arrays["statistics"]
    inside = range(flat.ctypes.data, flat.ctypes.data + flat.nbytes)
    assert all(address(v.value.read_value()) not in inside for v in statistics.variables)
    for variable in statistics.variables:
        variable.value.assign_add(tf.ones(variable.shape))
    np.testing.assert_array_equal(flat, values_of(statistics, 1))
    moved = statistics.values()
    receive(replica, groups, 2, statistics=False)
    np.testing.assert_array_equal(statistics.values(), moved)
    np.testing.assert_array_equal(trainable.values(), values_of(trainable, 2))
