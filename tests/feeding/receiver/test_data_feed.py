"""DataFeed means what TensorFlowOnSpark's does, but for the differences it states."""

import contextlib
from typing import ClassVar

import numpy as np
import pytest

from feeding.columnar.rows import rows_of
from feeding.columnar.schema import row_class
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import (
    FeedError,
    FeedSettingsError,
    FeedTimeout,
    ResultCountError,
    ResultTypeError,
    SchemaError,
)
from feeding.receiver.channel import FeedChannel
from feeding.receiver.data_feed import DataFeed
from tests.support.packed import packed

CONFIG = FeedConfig(starve_timeout_s=5.0)


def fill(channel, *epochs, chunk_rows=4, mode="train"):
    config = FeedConfig(chunk_rows=chunk_rows)
    for epoch, partitions in enumerate(epochs):
        for partition, rows in enumerate(partitions):
            session = partition + 1 if mode == "inference" else 0
            packer = Packer(config, epoch=epoch, partition=partition, mode=mode, session=session)
            for chunk in packer.chunks(iter(rows)):
                with channel._state.changed:
                    channel._state.queue("input").offer(chunk)
                    if session:
                        channel._state.answers_of("input").fed(chunk, 1)
        channel.flush("input", epoch)
    channel.finish("input")


def batches(feed, size):
    out = []
    while not feed.should_stop():
        out.append(feed.next_batch(size))
    return out


def make(*epochs, mode="train", chunk_rows=4, **options):
    channel = FeedChannel(CONFIG, worker="worker:1")
    fill(channel, *epochs, mode=mode, chunk_rows=chunk_rows)
    return channel, DataFeed(channel, **options)


def test_training_batches_cross_partitions_and_end_with_the_epoch():
    _, feed = make([range(5), range(5, 7)], [range(3)])
    assert batches(feed, 3) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2], []]


def test_an_epoch_that_ends_with_a_full_batch_gives_no_empty_one():
    _, feed = make([range(4)], [range(2)])
    assert batches(feed, 2) == [[0, 1], [2, 3], [0, 1], []]


def test_the_last_batch_may_be_empty_and_more_calls_stay_empty():
    _, feed = make([[]])
    assert not feed.should_stop()
    assert feed.next_batch(3) == []
    assert feed.should_stop()
    assert feed.next_batch(3) == []


def test_without_train_mode_batches_end_with_their_partition():
    _, feed = make([range(5), range(5, 7)], train_mode=False)
    assert batches(feed, 3) == [[0, 1, 2], [3, 4], [5, 6], []]


@pytest.mark.parametrize("train_mode", [True, False])
def test_rows_of_inference_always_end_with_their_partition(train_mode):
    channel, feed = make([range(5), range(5, 7)], mode="inference", train_mode=train_mode)
    seen = []
    while not feed.should_stop():
        batch = feed.next_batch(3)
        seen.append(batch)
        feed.batch_results(list(batch))
    assert seen == [[0, 1, 2], [3, 4], [5, 6], []]
    assert channel.stats("input").taken_rows == 7


@pytest.mark.slow
def test_a_partition_that_pauses_does_not_hold_up_the_others_of_its_worker():
    channel = FeedChannel(FeedConfig(starve_timeout_s=2.0))
    slow, quick = (Packer(FeedConfig(), mode="inference", session=s, partition=s) for s in (1, 2))
    feed = DataFeed(channel)

    def offer(chunk):
        with channel._state.changed:
            channel._state.queue("input").offer(chunk)
            channel._state.answers_of("input").fed(chunk, 1)
            channel._state.changed.notify_all()

    seen = []
    offer(packed(slow, [1, 2, 3]))
    offer(packed(quick, list(range(10))))
    with contextlib.suppress(FeedTimeout):
        for _ in range(2):
            seen.append(feed.next_batch(10))
            feed.batch_results(list(seen[-1]))
    assert seen == [[1, 2, 3], list(range(10))]
    offer(packed(slow, [4]))
    with pytest.raises(FeedTimeout):  # alone, it is waited for
        feed.next_batch(10)


def test_a_batch_of_inference_is_not_ended_before_its_next_rows_may_have_come(monkeypatch):
    """Each size of a batch that is new costs a model a trace."""
    channel = FeedChannel(CONFIG)
    one, other = (Packer(FeedConfig(), mode="inference", session=s, partition=s) for s in (1, 2))

    def offer(chunk):
        channel._state.queue("input").offer(chunk)
        channel._state.answers_of("input").fed(chunk, 1)

    offer(packed(one, [1, 2]))
    offer(packed(other, [8, 9]))
    real, found = channel._state.wait_for, []

    def wait_for(poll, *options):
        found.append(poll())
        offer(packed(one, [3, 4]))
        return real(poll, *options)

    monkeypatch.setattr(channel._state, "wait_for", wait_for)
    assert DataFeed(channel).next_batch(4) == [1, 2, 3, 4]
    assert found == [None]


def test_rows_of_two_partitions_never_share_a_batch_of_inference():
    channel = FeedChannel(CONFIG)
    packers = [Packer(FeedConfig(), mode="inference", session=s, partition=s) for s in (1, 2)]
    chunks = [
        [packed(p, [s * 10 + i, s * 10 + i + 1]) for i in (0, 2)] for s, p in enumerate(packers)
    ]
    with channel._state.changed:
        for pair in zip(*chunks, strict=True):
            for chunk in pair:
                channel._state.queue("input").offer(chunk)
                channel._state.answers_of("input").fed(chunk, 1)
    feed = DataFeed(channel)
    batch = feed.next_batch(4)
    assert batch == [0, 1, 2, 3]
    feed.batch_results(list(batch))
    assert feed.next_batch(4) == [10, 11, 12, 13]


def test_results_may_come_in_parts_but_must_be_complete():
    _, feed = make([range(4)], mode="inference")
    feed.next_batch(4)
    feed.batch_results([1, 2])
    feed.batch_results(iter([3]))
    with pytest.raises(ResultCountError, match="worker:1 returned 3 results for 4 rows"):
        feed.next_batch(4)


@pytest.mark.parametrize("of_result", [lambda result: [result], lambda result: result[None]])
def test_a_result_may_be_larger_than_a_fed_row(of_result, monkeypatch):
    small = FeedConfig(starve_timeout_s=5.0, chunk_bytes=64, max_chunk_bytes=64)
    monkeypatch.setattr(f"{__name__}.CONFIG", small)
    channel, feed = make([[1]], mode="inference")
    feed.next_batch(1)
    feed.batch_results(of_result(np.full(100, 0.5)))
    (chunk,) = channel._state.answers_of("input").session(1).ready
    assert chunk.num_bytes == 800


def test_wide_results_come_in_chunks_bounded_by_bytes():
    channel, feed = make([range(64)], mode="inference", chunk_rows=64)
    feed.next_batch(64)
    rows = [np.full(50_000, row, np.float64) for row in range(64)]
    feed.batch_results(rows)
    ready = channel._state.answers_of("input").session(1).ready
    assert max(chunk.num_bytes for chunk in ready) <= 2 * CONFIG.chunk_bytes
    assert [row[0] for chunk in ready for row in rows_of(chunk)] == list(range(64))
    assert [chunk.meta.first_row for chunk in ready] == list(range(0, 64, ready[0].num_rows))


@pytest.mark.parametrize(
    ("value", "kind"), [([0.5], "list"), (0.5, "float"), (np.float32(0.5), "float32")], ids=str
)
def test_a_dict_of_what_is_no_array_is_no_result(value, kind):
    _, feed = make([[1.0]], mode="inference")
    feed.next_batch(1)
    told = rf"dict with 'pred' of {kind}, expected arrays .* np\.asarray"
    with pytest.raises(ResultTypeError, match=told):
        feed.batch_results({"digit": np.zeros(1), "pred": value})
    feed.batch_results([{"pred": 0.5}])
    assert feed.next_batch(1) == []


def test_the_mask_of_results_is_not_lost_silently():
    _, feed = make([[1.0, 2.0]], mode="inference")
    feed.next_batch(2)
    masked = np.ma.array([0.5, 1e20], mask=[False, True])
    with pytest.raises(ResultTypeError, match=r"got a masked array: .*filled\(\) values"):
        feed.batch_results(masked)
    with pytest.raises(ResultTypeError, match=r"masked array in 'pred': .*filled"):
        feed.batch_results({"digit": np.zeros(2), "pred": masked})
    feed.batch_results(masked.filled(0))


def test_input_mapping_orders_tensors_by_column_name():
    rows = [(i, float(i)) for i in range(3)]  # as df.select(sorted(["features", "label"])) gives
    _, feed = make([rows], input_mapping={"label": "y", "features": "x"})
    batch = feed.next_batch(10)
    assert batch == {"x": [0, 1, 2], "y": [0.0, 1.0, 2.0]}
    assert isinstance(batch, dict)
    assert list(batch) == ["x", "y"]
    assert feed.next_batch(10) == {"x": [], "y": []}


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        (
            {"label": "x", "image": "y", "id": "y", "key": "x"},
            r"has the columns \['id', 'image'\] under one name, 'y'; give each a tensor name",
        ),
        (["image"], r"must be a dict from column to tensor name, got \['image'\] \(list\)"),
    ],
    ids=["shared name", "list"],
)
def test_input_mapping_has_one_tensor_for_each_column(mapping, told):
    with pytest.raises(FeedSettingsError, match="input_mapping " + told):
        make([[(0, 7, 1)]], input_mapping=mapping)


NAMED = row_class(("label", "features", "other"))


@pytest.mark.parametrize(
    "rows",
    [
        [NAMED((i, [i, i], "z")) for i in range(3)],
        [{"label": i, "features": [i, i], "other": "z"} for i in range(3)],
        [([i, i], i) for i in range(3)],
    ],
    ids=["Row", "dict", "tuple"],
)
def test_input_mapping_takes_named_columns_by_name_and_others_by_position(rows):
    _, feed = make([rows], input_mapping={"features": "x", "label": "y"})
    assert feed.next_batch(9) == {"x": [[0, 0], [1, 1], [2, 2]], "y": [0, 1, 2]}


class CountedName(str):
    """A column's name that counts comparisons."""

    __slots__ = ()
    compared: ClassVar[list[str]] = []
    __hash__ = str.__hash__

    def __eq__(self, other):
        self.compared.append(self)
        return str.__eq__(self, other)


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
def test_thousands_of_columns_are_each_found_once(call):
    names = [CountedName(f"c{i:02}") for i in range(80)]
    row = {str(name): i if i % 2 else str(i) for i, name in enumerate(names)}
    _, feed = make([[row]], input_mapping={name: name for name in names})
    names[0].compared.clear()
    assert list(getattr(feed, call)(1)) == [str(name) for name in names]
    assert len(names[0].compared) <= 6 * len(names)


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3, 4], [5, 6, 7, 8]],
        [(1, 2, 3, 4), (5, 6, 7, 8)],
        [[[1, 0], [2, 0], [3, 0], [4, 0]], [[5, 0], [6, 0], [7, 0], [8, 0]]],
    ],
    ids=["list", "tuple", "nested"],
)
def test_input_mapping_of_rows_of_numbers_is_by_position(rows, call):
    _, feed = make([rows], input_mapping={"b": "B", "a": "A", "d": "D", "c": "C"})
    found = {name: np.array(values).tolist() for name, values in getattr(feed, call)(9).items()}
    assert found == {name: list(values) for name, *values in zip("ABCD", *rows, strict=True)}


def test_input_mapping_of_nested_rows():
    rows = [((1, 2), "t"), ((3, 4), "u")]
    _, feed = make([rows], input_mapping={"a": "pair", "b": "text"})
    assert feed.next_batch(9) == {"pair": [(1, 2), (3, 4)], "text": ["t", "u"]}


PAIR = row_class(("label", "features"))


@pytest.mark.parametrize(
    ("rows", "features"),
    [
        ([PAIR((i, (i, 0.5))) for i in range(2)], [(0, 0.5), (1, 0.5)]),
        ([PAIR((i, ["p", "q"])) for i in range(2)], [["p", "q"], ["p", "q"]]),
        ([{"label": i, "features": {"a": i}} for i in range(2)], [{"a": 0}, {"a": 1}]),
    ],
    ids=["tuple", "texts", "dict"],
)
def test_input_mapping_takes_nested_columns_by_name_too(rows, features):
    mapping = {"features": "x", "label": "y"}
    _, feed = make([rows], input_mapping=mapping)
    assert feed.next_batch(9) == {"x": features, "y": [0, 1]}
    _, feed = make([rows], input_mapping=mapping)
    arrays = feed.next_arrays(9)
    assert list(arrays) == ["x", "y"]
    assert arrays["y"].tolist() == [0, 1]


def test_input_mapping_of_a_struct_gives_its_arrays():
    rows = [{"label": i, "features": {"a": i + 5, "b": "t"}} for i in range(2)]
    _, feed = make([rows], input_mapping={"features": "x", "label": "y"})
    features = feed.next_arrays(9)["x"]
    assert (features["a"].tolist(), features["b"].tolist()) == ([5, 6], ["t", "t"])
    _, feed = make([rows], input_mapping={"features.a": "x", "label": "y"})
    assert feed.next_arrays(9)["x"].tolist() == [5, 6]


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
@pytest.mark.parametrize(
    "row",
    [
        row_class(("label", "Image"))((0, 7)),
        row_class(("Label", "Image"))((0, 7)),
        {"label": 0, "Image": 7},
        {"a": 0, "b": 7},
    ],
    ids=["Row", "Row in capitals", "dict", "other dict"],
)
def test_input_mapping_does_not_take_columns_of_other_names_by_position(row, call):
    _, feed = make([[row]], input_mapping={"image": "x", "label": "y"})
    told = r"names the columns \['image', 'label'\], but a row has \[.*\], without \['image'"
    with pytest.raises(SchemaError, match=told):
        getattr(feed, call)(9)


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
def test_input_mapping_takes_rows_without_any_of_its_names_by_position(call):
    rows = [row_class(("_1", "_2"))((i, i + 5)) for i in range(2)]
    _, feed = make([rows], input_mapping={"features": "x", "label": "y"})
    found = getattr(feed, call)(9)
    assert {name: list(values) for name, values in found.items()} == {"x": [0, 1], "y": [5, 6]}


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
@pytest.mark.parametrize(
    "names", [("image", "target"), ("Image", "Label"), ("a", "label")], ids=str
)
def test_input_mapping_takes_rows_by_position_where_their_names_agree_with_it(names, call):
    rows = [row_class(names)((i, i + 5)) for i in range(2)]
    _, feed = make([rows], input_mapping={"label": "y", "image": "x"})
    found = getattr(feed, call)(9)
    assert {name: list(values) for name, values in found.items()} == {"x": [0, 1], "y": [5, 6]}


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
def test_input_mapping_names_columns_inside_of_structs_and_of_tuples(call):
    rows = [{"label": i, "features": {"a": i + 5, "b": "t"}} for i in range(2)]
    _, feed = make([rows], input_mapping={"features.a": "x", "label": "y"})
    found = getattr(feed, call)(9)
    assert {name: list(values) for name, values in found.items()} == {"x": [5, 6], "y": [0, 1]}
    _, feed = make([[(*range(11), "t")]], input_mapping={str(at): f"t{at}" for at in range(11)})
    found = getattr(feed, call)(9)
    assert {name: list(values) for name, values in found.items()} == {
        f"t{at}": [at] for at in range(11)
    }


def test_arrays_of_nested_rows_are_mapped_by_position_too():
    _, feed = make([[((1, "a"), 2), ((3, "b"), 4)]], input_mapping={"p": "x", "q": "y", "r": "z"})
    found = {name: list(values) for name, values in feed.next_arrays(9).items()}
    assert found == {"x": [1, 3], "y": ["a", "b"], "z": [2, 4]}


@pytest.mark.parametrize("call", ["next_batch", "next_arrays"])
@pytest.mark.parametrize("row", [(1, 2, 3), [1, 2, 3]], ids=["tuple", "list"])
def test_input_mapping_that_does_not_fit_says_both_numbers(row, call):
    _, feed = make([[row]], input_mapping={"a": "A", "b": "B"})
    with pytest.raises(SchemaError, match=r"names 2 columns \['a', 'b'\], a row has 3 values"):
        getattr(feed, call)(9)


def test_terminate_counts_the_rest_as_dropped():
    channel, feed = make([range(10)])
    assert feed.next_batch(3) == [0, 1, 2]
    feed.terminate()
    assert feed.should_stop()
    assert feed.next_batch(3) == []
    stats = channel.stats("input")
    assert (stats.fed_rows, stats.taken_rows, stats.dropped_rows) == (10, 3, 7)


def test_a_feed_ends_where_its_reader_asks_once_the_training_is_to_stop():
    channel, feed = make([range(10)])
    is_asked = False
    feed.stop_asked = lambda: is_asked
    assert not feed.should_stop()
    assert feed.next_batch(3) == [0, 1, 2]
    is_asked = True
    assert feed.should_stop()
    assert feed.next_batch(3) == []
    assert channel.stats("input").dropped_rows == 7


@pytest.mark.parametrize("size", [0, -1, 1.5, "32", True])
def test_batch_size_must_be_a_positive_int(size):
    _, feed = make([[1]])
    with pytest.raises(FeedSettingsError, match="batch_size must be an int >= 1, got"):
        feed.next_batch(size)


def test_a_trainer_that_failed_releases_a_consumer_in_another_thread():
    channel = FeedChannel(CONFIG, worker="worker:1")
    channel.fail("boom")
    with pytest.raises(FeedError, match="boom"):
        DataFeed(channel).next_batch(1)
