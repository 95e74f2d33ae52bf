"""The chief and micro-batches: what it answers to orders, what it notes, when it saves."""

from __future__ import annotations

from typing import Any

from tfos.control.messages import BatchReport, LeaveBatch, SaveBatches, TrainBatch
from tfos.worker.micro_batches import METADATA_NAME, MicroBatches


class Client:
    """Keeps metadata, as the servers do."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    def set_metadata(self, name: str, value: Any) -> None:
        self.metadata[name] = value


class Saver:
    """Writes down what is asked of it, and what the metadata was at a save."""

    def __init__(self, client: Client, restored: dict[str, Any] | None = None) -> None:
        self.client = client
        self.restored = restored or {}
        self.error = ""
        self.log: list[Any] = []

    def restored_metadata(self) -> dict[str, Any]:
        return self.restored

    def hold(self) -> None:
        self.log.append("hold")

    def release(self) -> None:
        self.log.append("release")

    def save_now(self) -> str:
        self.log.append(dict(self.client.metadata.get(METADATA_NAME, {})))
        return self.error


class Bed:
    def __init__(self, **restored: int) -> None:
        self.client = Client()
        self.saver = Saver(self.client, {METADATA_NAME: restored} if restored else None)
        self.said: list[BatchReport] = []
        self.batches = MicroBatches(self.said.append)
        saver: Any = self.saver
        client: Any = self.client
        self.batches.begin(saver, lambda: client)

    def order(self, number: int, epoch: int, batch_id: int, **changes: Any) -> TrainBatch:
        settings = {"query": "q", "holds": True, "saves": True, **changes}
        return TrainBatch("input", number, epoch, batch_id=batch_id, **settings)


def test_it_begins_with_the_restored_batch_ids():
    (begun,) = Bed(q=7, r=2).said
    assert (begun.feed, begun.number, begun.is_done) == ("", 0, True)
    assert begun.trained == begun.saved == {"q": 7, "r": 2}
    assert Bed().said[0].trained == {}


def test_a_batch_is_noted_then_saved_then_reported_and_no_save_begins_meanwhile():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 4))
    assert bed.saver.log == ["hold"]
    assert (bed.said[-1].number, bed.said[-1].is_done, bed.said[-1].trained) == (1, False, {})
    bed.batches.flushed("input", 0)
    assert bed.said[-1].is_done is False  # rows that were read are not trained yet
    bed.batches.trained("input", 0)
    assert bed.saver.log == ["hold", {"q": 4}, "release"]
    last = bed.said[-1]
    assert (last.number, last.is_done, last.is_noted, last.error) == (1, True, True, "")
    assert (last.trained, last.saved) == ({"q": 4}, {"q": 4})


def test_an_epoch_that_ended_before_the_batch_does_not_count_for_it():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 3, 0))
    for epoch in (-1, 2):
        bed.batches.trained("input", epoch)
    bed.batches.trained("other", 3)
    assert bed.client.metadata == {}
    bed.batches.trained("input", 3)
    bed.batches.trained("input", 4)
    assert bed.client.metadata == {METADATA_NAME: {"q": 0}}
    assert len(bed.said) == 3


def test_a_batch_without_rows_gives_its_epoch_to_the_next_one():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 0))
    bed.batches.expect(bed.order(2, 0, 1))
    bed.batches.trained("input", 0)
    assert bed.client.metadata == {METADATA_NAME: {"q": 1}}
    assert [said.number for said in bed.said] == [0, 1, 2, 2]


def test_a_save_that_fails_is_reported_and_can_be_asked_for_again():
    bed = Bed()
    bed.batches.follow("input")
    bed.saver.error = "OSError: No space left"
    bed.batches.expect(bed.order(1, 0, 0))
    bed.batches.trained("input", 0)
    last = bed.said[-1]
    assert (last.error, last.trained, last.saved) == ("OSError: No space left", {"q": 0}, {})
    bed.saver.error = ""
    bed.batches.save(SaveBatches("input", 2))
    last = bed.said[-1]
    assert (last.number, last.error, last.saved) == (2, "", {"q": 0})


def test_a_batch_that_failed_is_never_noted_and_saves_wait_for_a_later_epoch():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 4))
    assert not bed.batches.leave(LeaveBatch("input", 1, in_part=True))
    bed.batches.trained("input", 0)  # the end of what was fed of it
    assert bed.client.metadata == {}
    assert bed.saver.log == ["hold"]
    bed.batches.trained("input", 1)  # the user has gone on with other data
    assert bed.saver.log == ["hold", "release"]
    bed.batches.expect(bed.order(2, 2, 4))
    bed.batches.trained("input", 2)
    assert bed.client.metadata == {METADATA_NAME: {"q": 4}}


def test_saves_by_time_go_on_behind_a_batch_without_rows():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 4))
    assert bed.batches.leave(LeaveBatch("input", 1, in_part=False))
    bed.batches.trained("input", 0)
    assert bed.client.metadata == {}
    assert bed.batches.leave(LeaveBatch("input", 2, in_part=False))  # overtakes its order
    bed.batches.expect(bed.order(2, 1, 5))
    bed.batches.trained("input", 1)
    assert bed.client.metadata == {}
    assert bed.saver.log == ["hold", "hold", "release"]


def test_code_that_never_says_trained_is_reported_as_such_once_the_rows_are_read():
    bed = Bed()
    bed.batches.expect(bed.order(1, 0, 0))
    bed.batches.flushed("input", 0)
    last = bed.said[-1]
    assert (last.number, last.is_done, last.is_noted, last.trained) == (1, True, False, {})
    assert bed.saver.log == ["hold", "release"]
    assert bed.client.metadata == {}


def test_only_the_queries_trained_last_are_noted():
    bed = Bed()
    bed.batches.follow("input")
    for number in range(20):
        query = f"q{number % 18}"
        bed.batches.expect(bed.order(number, number, number, query=query, saves=False))
        bed.batches.trained("input", number)
    kept = bed.client.metadata[METADATA_NAME]
    assert list(kept)[-2:] == ["q0", "q1"]
    assert len(kept) == 16
    assert kept["q1"] == 19
