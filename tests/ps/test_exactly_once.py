"""The exactly-once record: fencing, gaps, sessions, half-applied pushes, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps import exactly_once
from ps.errors import PSError, PSSettingsError, SequenceGap, ServerPhaseError, StaleGeneration
from ps.exactly_once import (
    MAX_SEQUENCE,
    CompletionLog,
    LogSnapshot,
    RequestId,
    SessionRecord,
    Ticket,
    Verdict,
)
from ps.manifest.manifest import WorkerRank

W0, W1 = WorkerRank(0), WorkerRank(1)
NUM_BUCKETS = 3
SIZES = st.sampled_from((0, 1, NUM_BUCKETS))
"""How many units a request changes: none by a join, few by one to a table, all by one to all."""


def request(sequence: int, *, worker: WorkerRank = W0, generation: int = 0, session: int = 77):
    return RequestId(worker, generation, session, sequence)


def apply_whole(record: CompletionLog, name: RequestId) -> Verdict:
    ticket = record.begin(name)
    for bucket in range(NUM_BUCKETS):
        if ticket.needs(bucket):
            ticket.mark(bucket)
    ticket.complete(is_update=True)
    return ticket.verdict


def needed(ticket: Ticket) -> list[bool]:
    return [ticket.needs(bucket) for bucket in range(NUM_BUCKETS)]


def sessions_of(cut: LogSnapshot, buckets: Sequence[int] = range(NUM_BUCKETS)):
    for bucket in buckets:
        cut.note(bucket)
    return cut.sessions()


def saved_and_restored(record: CompletionLog) -> CompletionLog:
    restored = CompletionLog(NUM_BUCKETS)
    restored.restore(sessions_of(record.snapshot()))
    return restored


@pytest.fixture
def record() -> CompletionLog:
    return CompletionLog(NUM_BUCKETS)


def test_numbers_in_order_are_new(record: CompletionLog):
    assert [apply_whole(record, request(n)) for n in (1, 2, 3)] == [Verdict.NEW] * 3


@pytest.mark.fault("F24")
def test_a_completed_request_is_repeated(record: CompletionLog):
    apply_whole(record, request(1))
    again = record.begin(request(1))
    assert again.verdict is Verdict.DUPLICATE
    assert needed(again) == [False, False, False]


@pytest.mark.fault("F28")
def test_a_half_applied_push_is_resumed_where_it_was_cut(record: CompletionLog):
    record.begin(request(1)).mark(0)
    again = record.begin(request(1))
    assert again.verdict is Verdict.RESUMED
    assert needed(again) == [False, True, True]


def test_workers_do_not_share_numbers(record: CompletionLog):
    apply_whole(record, request(1))
    assert record.begin(request(1, worker=W1)).verdict is Verdict.NEW


def test_two_clients_of_one_worker_do_not_share_numbers(record: CompletionLog):
    apply_whole(record, request(1, session=1))
    assert apply_whole(record, request(1, session=2)) is Verdict.NEW
    assert apply_whole(record, request(2, session=1)) is Verdict.NEW
    assert record.begin(request(1, session=2)).verdict is Verdict.DUPLICATE


@pytest.mark.attack("A10")
@pytest.mark.fault("F24")
@given(st.integers(1, 40), st.lists(st.integers(0, 39), max_size=40))
def test_no_number_of_clients_makes_a_request_come_twice(num_sessions: int, again: list[int]):
    """Each comes again at any time, as often as its sender likes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exactly_once, "MAX_SESSIONS", 32)
        patched.setattr(exactly_once, "MAX_UNDER_WAY", 4)
        record = CompletionLog(NUM_BUCKETS)
        done: dict[int, int] = {}
        for session in range(num_sessions):
            if session < 32:
                assert apply_whole(record, request(1, session=session)) is Verdict.NEW
                done[session] = 1
            else:
                with pytest.raises(PSSettingsError, match="limit of 32 clients, closed ones"):
                    record.begin(request(1, session=session))
        for session in again:
            if session not in done:
                continue
            assert apply_whole(record, request(done[session], session=session)) is Verdict.DUPLICATE
            done[session] += 1
            number = request(done[session], session=session)
            assert record.begin(number, done[session] - 1).verdict is Verdict.NEW
            record.begin(number).complete()
    assert {each.session: each.completed for each in sessions_of(record.snapshot())} == done


@pytest.mark.attack("A10")
def test_a_request_under_way_makes_no_room_for_another(record: CompletionLog, monkeypatch):
    monkeypatch.setattr(exactly_once, "MAX_UNDER_WAY", 2)
    for session in (1, 2):
        record.begin(request(1, session=session)).mark(0)
    for _ in range(2):
        with pytest.raises(PSSettingsError, match="limit of 2 clients with a request under way"):
            record.begin(request(1, session=3))
    assert needed(record.begin(request(1, session=1))) == [False, True, True]
    record.begin(request(1, session=2)).complete()
    assert apply_whole(record, request(1, session=3)) is Verdict.NEW
    assert record.begin(request(1, session=2)).verdict is Verdict.DUPLICATE


def test_a_late_copy_of_a_session_that_gave_its_room_up_changes_nothing(
    record: CompletionLog, monkeypatch
):
    monkeypatch.setattr(exactly_once, "MAX_UNDER_WAY", 1)
    late = record.begin(request(1))
    apply_whole(record, request(1))
    apply_whole(record, request(1, session=2))
    assert needed(late) == [False, False, False]
    late.mark(0)
    assert record.begin(request(1)).verdict is Verdict.DUPLICATE
    assert late.session.applied is None, "its memory is free"


def test_numbers_of_requests_that_were_refused_before_may_be_left_out(record: CompletionLog):
    apply_whole(record, request(1))
    assert record.begin(request(4), acknowledged=1).verdict is Verdict.NEW


@pytest.mark.fault("F30")
def test_a_server_that_lost_what_it_acknowledged_says_so(record: CompletionLog):
    with pytest.raises(
        SequenceGap, match=r"request 6 .* acknowledged, but this server knows requests up to 0"
    ):
        record.begin(request(7), acknowledged=6)


def test_a_late_copy_of_an_older_push_changes_nothing(record: CompletionLog):
    late = record.begin(request(1))  # cut before any bucket
    record.begin(request(2))  # the client gave the first one up
    assert needed(late) == [False, False, False]
    assert record.begin(request(1)).verdict is Verdict.DUPLICATE


@pytest.mark.fault("F20")
def test_a_newer_generation_replaces_the_older(record: CompletionLog):
    apply_whole(record, request(1))
    assert record.begin(request(1, generation=1, session=2)).verdict is Verdict.NEW
    with pytest.raises(StaleGeneration, match="generation 0 was replaced"):
        record.begin(request(2))
    assert [each.generation for each in sessions_of(record.snapshot())] == [1]


@pytest.mark.fault("F28")
def test_the_first_overflow_of_a_request_is_known_to_every_copy_and_to_no_other_request(
    record: CompletionLog,
):
    first, second = PSError("first"), PSError("second")

    def told(ticket: Ticket) -> str:
        return "" if ticket.overflow is None else ticket.overflow.message

    record.begin(request(1)).mark(0, first)
    again = record.begin(request(1))
    assert told(again) == "first"
    again.mark(1, second)
    again.mark(2)
    again.complete(is_update=True)
    assert told(again) == told(record.begin(request(1))) == "first"
    assert told(record.begin(request(1, session=7))) == ""
    following = record.begin(request(2))
    assert told(following) == ""
    following.mark(0, second)
    assert told(following) == "second"


@pytest.mark.fault("F06")
def test_a_fence_stops_a_push_between_two_buckets(record: CompletionLog):
    ticket = record.begin(request(1))
    ticket.mark(0)
    record.fence(W0, 1)
    for ask in (ticket.check, partial(ticket.needs, 1)):
        with pytest.raises(StaleGeneration, match="generation 0 was replaced"):
            ask()
    assert record.begin(request(1, generation=1)).verdict is Verdict.NEW


def test_a_fence_before_the_first_push_holds(record: CompletionLog):
    record.fence(W0, 2)
    with pytest.raises(StaleGeneration, match="accepts 2 and newer"):
        record.begin(request(1, generation=1))
    assert record.generation_of(W0) == 2


def test_a_fence_never_goes_back(record: CompletionLog):
    record.fence(W0, 5)
    record.fence(W0, 2)
    assert record.generation_of(W0) == 5


@pytest.mark.fault("F31")
@pytest.mark.parametrize("last", [2**31 - 1, 2**32 - 1, 2**53, MAX_SEQUENCE - 1])
def test_sequence_numbers_do_not_wrap(record: CompletionLog, last: int):
    old = request(last, generation=2**62)
    record.restore([SessionRecord(W0, 2**62, 77, (last,) * NUM_BUCKETS, 0, 0, 0)])
    assert record.begin(old).verdict is Verdict.DUPLICATE
    new = old._replace(sequence=last + 1)
    ticket = record.begin(new)
    assert ticket.verdict is Verdict.NEW
    ticket.mark(0)
    assert needed(ticket) == [False, True, True]


def test_a_checkpoint_in_the_middle_of_a_push_resumes_bucket_by_bucket(record: CompletionLog):
    apply_whole(record, request(1))
    ticket = record.begin(request(2))
    ticket.mark(0)
    cut = record.snapshot()
    for bucket in (1, 2):
        cut.note(bucket)  # as whoever changes it after the cut lets be done
        ticket.mark(bucket)
    ticket.complete()
    apply_whole(record, request(1, session=7))  # begun after the cut
    record.fence(request(2).worker, 1)
    restored = CompletionLog(NUM_BUCKETS)
    restored.restore(sessions_of(cut, [0]))
    again = restored.begin(request(2))
    assert again.verdict is Verdict.RESUMED
    assert needed(again) == [False, True, True]


@pytest.mark.fault("F08")
def test_after_a_restore_the_lost_updates_are_counted(record: CompletionLog):
    apply_whole(record, request(1))
    restored = saved_and_restored(record)
    ticket = restored.begin(request(7), acknowledged=6, acked_updates=6)
    assert ticket.verdict is Verdict.NEW
    assert restored.lost_updates == 5
    ticket.complete()
    with pytest.raises(SequenceGap):
        restored.begin(request(10), acknowledged=9)


@pytest.mark.fault("F08")
@given(
    before=st.lists(SIZES, max_size=3),
    torn=SIZES,
    reach=st.integers(0, NUM_BUCKETS),
    after=st.none() | st.lists(SIZES, max_size=3),
)
def test_after_a_restore_what_is_missing_is_what_is_told(
    before: list[int], torn: int, reach: int, after: list[int] | None
):
    """The first units change; none at all by a join. `after` None: the torn one comes again."""
    client = Sender()
    for size in before:
        client.send(size)
    client.cut_in_the_middle(torn, reach)
    cut, saved = client.record.snapshot(), client.units.copy()
    for unit in range(NUM_BUCKETS):
        cut.note(unit)
    if after is not None:
        client.resend(torn)
        for size in after:
            client.send(size)
    restored, client.units = CompletionLog(NUM_BUCKETS), saved
    restored.restore(cut.sessions())
    client.record = restored
    if after is None:
        client.resend(torn)
        sizes, lost = [*before, torn], 0
    else:
        client.send(NUM_BUCKETS)
        sizes, lost = [], sum(size > 0 for size in after) + (reach < torn)
    assert restored.lost_updates == lost
    if after is None:
        assert client.units == [sum(size > unit for size in sizes) for unit in range(NUM_BUCKETS)]
    client.send(NUM_BUCKETS)
    assert restored.lost_updates == lost, "told once"


class Sender:
    """One session whose requests change the first units of a record."""

    def __init__(self) -> None:
        self.record = CompletionLog(NUM_BUCKETS)
        self.units = [0] * NUM_BUCKETS
        self.sequence = 0
        self.told = 0, 0

    def send(self, size: int) -> None:
        self.cut_in_the_middle(size, 0)
        self.resend(size)

    def cut_in_the_middle(self, size: int, reach: int) -> None:
        self.sequence += 1
        self._begin(size, reach)

    def resend(self, size: int) -> None:
        """Finish the last request, and hear that it is done."""
        self._begin(size, size).complete(is_update=size > 0)
        self.told = self.sequence, self.told[1] + (size > 0)

    def _begin(self, size: int, reach: int) -> Ticket:
        ticket = self.record.begin(request(self.sequence), *self.told)
        ticket.expect(size)
        for unit in range(min(size, reach)):
            if ticket.needs(unit):
                self.units[unit] += 1
                ticket.mark(unit)
        return ticket


def test_another_run_is_not_taken_for_the_one_that_was_saved(record: CompletionLog):
    apply_whole(record, request(1, generation=4))
    restored = saved_and_restored(record)
    assert restored.begin(request(1, generation=0, session=1)).verdict is Verdict.NEW


def test_a_record_of_another_cut_is_refused(record: CompletionLog):
    with pytest.raises(ServerPhaseError, match="2 units"):
        record.restore([SessionRecord(W0, 0, 1, (1, 1), 0, 0, 0)])


@pytest.mark.fault("F08")
def test_a_server_without_buckets_and_rows_has_lost_nothing_by_a_restore():
    empty, restored = CompletionLog(0), CompletionLog(0)
    for sequence in range(1, 6):
        empty.begin(request(sequence), sequence - 1).complete()
    restored.restore(empty.snapshot().sessions())
    assert restored.begin(request(5), 4).verdict is Verdict.DUPLICATE
    assert restored.begin(request(6), 5).verdict is Verdict.NEW
    assert restored.lost_updates == 0


@pytest.mark.fault("F27")
@pytest.mark.parametrize("num_buckets", [NUM_BUCKETS, NUM_BUCKETS - 1])
def test_a_push_in_flight_at_a_cut_counts_once_there_or_after_the_restore(num_buckets: int):
    """Units behind the buckets are a table's; a push to the groups never changes them."""
    record, restored, name = CompletionLog(NUM_BUCKETS), CompletionLog(NUM_BUCKETS), request(1)
    ticket = record.begin(name)
    for bucket in range(num_buckets):
        ticket.mark(bucket)
    cut = record.snapshot()
    restored.restore(sessions_of(cut))
    is_counted_again = restored.begin(name).verdict is not Verdict.DUPLICATE
    assert cut.num_uncounted(num_buckets) + is_counted_again == 1


@pytest.mark.fault("F27")
def test_a_push_to_some_rows_that_had_changed_them_all_is_done_after_a_restore():
    """It changes no bucket, so it is no step of the groups."""
    record, name = CompletionLog(NUM_BUCKETS), request(1)
    ticket = record.begin(name)
    ticket.expect(1)
    ticket.mark(NUM_BUCKETS - 1)
    cut = record.snapshot()
    (saved,) = sessions_of(cut)
    assert (saved.completed, saved.updates) == (1, 1)
    assert cut.num_uncounted(NUM_BUCKETS - 1) == 0
    restored = CompletionLog(NUM_BUCKETS)
    restored.restore([saved])
    assert restored.begin(name).verdict is Verdict.DUPLICATE


def test_two_copies_of_a_push_that_end_one_after_the_other_are_one_update(record: CompletionLog):
    copies = [record.begin(request(1)) for _ in range(2)]
    for copy in copies:
        copy.complete(is_update=True)
    assert sessions_of(record.snapshot())[0].updates == 1


def test_a_push_that_is_given_up_is_applied_by_no_copy_that_is_under_way(record: CompletionLog):
    copy = record.begin(request(1))
    record.give_up(record.begin(request(1)), is_update=True)
    assert not any(needed(copy))
    assert record.lost_updates == 1


def test_a_refusal_is_every_copys_of_that_push_and_not_of_the_next_one(record: CompletionLog):
    refused, copy = (record.begin(request(1)) for _ in range(2))
    refused.refuse(PSError("it is not finite"))
    assert "not finite" in str(copy.refusal)
    following = record.begin(request(2))
    assert following.refusal is None
    assert copy.refusal is None
    copy.refuse(PSError("too late"))
    assert following.refusal is None
    following.refuse(PSError("it is not finite either"))
    assert copy.refusal is None


@pytest.mark.fault("F27")
def test_a_client_that_began_after_the_save_goes_on_after_a_restore(record: CompletionLog):
    apply_whole(record, request(1))
    restored = saved_and_restored(record)
    verdicts: list[Verdict] = []
    with suppress(SequenceGap):
        ticket = restored.begin(request(6, session=99), acknowledged=5, acked_updates=5)
        verdicts.append(ticket.verdict)
    assert verdicts == [Verdict.NEW]
    assert restored.lost_updates == 5
    with pytest.raises(SequenceGap):
        restored.begin(request(9, session=99), acknowledged=8)


def test_what_is_late_of_a_push_says_nothing_of_the_next_one(record: CompletionLog):
    late = record.begin(request(1))
    apply_whole(record, request(2))
    cut_off = record.begin(request(3))
    cut_off.mark(0)
    late.expect(1)
    late.complete(is_update=True)
    (saved,) = sessions_of(record.snapshot())
    assert (saved.completed, saved.updates) == (2, 1)
    assert record.begin(request(2)).verdict is Verdict.DUPLICATE


@pytest.mark.fault("F27")
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=6))
def test_whatever_is_cut_every_bucket_changes_once_per_push(pushes: list[list[int]]):
    record = CompletionLog(NUM_BUCKETS)
    applied = [0] * NUM_BUCKETS

    def deliver(sequence: int, reach: int) -> None:
        name = request(sequence)
        ticket = record.begin(name)
        for bucket in range(reach):
            if ticket.needs(bucket):
                applied[bucket] += 1
                ticket.mark(bucket)
        if reach == NUM_BUCKETS:
            ticket.complete()

    for sequence, cuts in enumerate(pushes, 1):
        for reach in [*cuts, NUM_BUCKETS]:
            deliver(sequence, reach)
        deliver(max(1, sequence - 1), NUM_BUCKETS)  # a late copy
    assert applied == [len(pushes)] * NUM_BUCKETS
