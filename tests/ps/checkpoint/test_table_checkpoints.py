"""Tables in checkpoints: every row comes back as it was, and nothing that was dropped does."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ps.checkpoint import format as form
from ps.checkpoint.choice import RestoreOptions, manifest_to_serve, read_manifest
from ps.checkpoint.digest import digest
from ps.checkpoint.inspect import export_npz, inspect
from ps.checkpoint.restore import verify
from ps.cli.main import main
from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError
from ps.manifest.initializer_spec import RandomNormal
from ps.manifest.manifest import SGD, Adagrad, Adam, Hyper, Manifest, RowWiseAdagrad
from ps.manifest.table_spec import Admission
from ps.server.server import PSServer, ServerSettings
from tests.support.ps_cluster import cluster, filled
from tests.support.snapshot_skew import last_applied
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]  # seconds, cold

HYPER = Hyper(0.1)
DELTAS = SaveOptions(full_every=9)
TWO = with_tables(
    table("user", Adagrad(), initializer=RandomNormal(), seed=3),
    table("item", Adam(), dim=9, dtype="float64", segments=3),
)


def push(client: PSClient, manifest: Manifest, seed: int, ids: range = range(500)) -> None:
    random = np.random.default_rng(seed)
    chosen = {spec.name: random.choice(ids, 60) for spec in manifest.tables}
    grads = {
        spec.name: random.standard_normal((60, spec.dim)).astype(spec.dtype)
        for spec in manifest.tables
    }
    client.tables.push({name: (chosen[name], grads[name]) for name in chosen}, hyper=HYPER)


def rows(client: PSClient, manifest: Manifest) -> dict[str, dict[int, bytes]]:
    """Every row with its slots, by table and id."""
    return {
        spec.name: {
            int(number): row.tobytes()
            for ids, batch in client.tables.scan(spec.name, with_slots=True)
            for number, row in zip(ids, batch, strict=True)
        }
        for spec in manifest.tables
    }


def trained(root: Path, manifest: Manifest = TWO, num_servers: int = 2) -> dict:
    """Save a full step 1 and the deltas 2 and 3; returns the rows of the last."""
    with cluster(num_servers=num_servers) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for step in (1, 2, 3):
            push(client, manifest, step)
            client.save(root, step, options=DELTAS)
        return rows(client, manifest)


@pytest.mark.fault("F42")
@pytest.mark.parametrize(("saved", "restored"), [(2, 2), (1, 3), (3, 2)])
def test_any_number_of_servers_restores_tables_and_trains_on_in_the_same_bits(
    tmp_path: Path, saved: int, restored: int
):
    with cluster(num_servers=saved) as bed:
        (client,) = bed.workers(TWO, filled(TWO))
        for step in (1, 2, 3):
            push(client, TWO, step)
            client.save(tmp_path, step, options=DELTAS)
        before = rows(client, TWO)
        push(client, TWO, 9)
        after = rows(client, TWO)
    with cluster(num_servers=restored) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 3
        client.seed(TWO, filled(TWO))  # adopts
        assert rows(client, TWO) == before
        push(client, TWO, 9)
        assert rows(client, TWO) == after


def test_a_segment_without_the_newest_rows_goes_on_at_its_tables_step_on_other_servers(
    tmp_path: Path,
):
    """Adam's step counts the pushes to the table, whichever rows they brought."""
    manifest = with_tables(table(rule=Adam(), segments=2))
    with cluster(num_servers=1) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        push(client, manifest, 1)
        for step in range(5):
            push(client, manifest, step, range(1))
        client.save(tmp_path, 1)
        push(client, manifest, 9)
        after = rows(client, manifest)
    with cluster(num_servers=3) as bed:
        client = bed.client()
        client.restore(tmp_path)
        push(client, manifest, 9)
        assert rows(client, manifest) == after


def test_numbers_of_a_row_are_saved_restored_and_exported(tmp_path: Path):
    manifest = with_tables(
        table("user", RowWiseAdagrad(), initializer=RandomNormal()),
        table("item", Adam(), row_steps=True, segments=3),
    )
    before = trained(tmp_path, manifest)
    with cluster(num_servers=3) as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.seed(manifest, filled(manifest))
        assert rows(client, manifest) == before
    assert [report.slots for report in inspect(tmp_path).steps[0].tables] == [
        ("accumulator",),
        ("momentum", "velocity", "steps"),
    ]
    export_npz(tmp_path, read_manifest(tmp_path, 3), tmp_path / "out.npz", slots=True)
    with np.load(tmp_path / "out.npz") as arrays:
        parts = {
            "user": [arrays[f"tables/user/values{name}"] for name in ("", ":accumulator")],
            "item": [
                arrays[f"tables/item/values{name}"]
                for name in ("", ":momentum", ":velocity", ":steps")
            ],
        }
        assert [part.shape[1] for part in parts["item"]] == [4, 4, 4, 1]
        for name, found in parts.items():
            exported = np.hstack(found)
            ids = arrays[f"tables/{name}/ids"].tolist()
            assert dict(zip(ids, map(np.ndarray.tobytes, exported), strict=True)) == before[name]
    other = with_tables(table("user", Adagrad(), initializer=RandomNormal()), manifest.tables[1])
    with (
        cluster(num_servers=1) as bed,
        pytest.raises(CheckpointError, match="rowwise_ad"),
    ):
        bed.client().restore(tmp_path, like=RestoreOptions(manifest=other))


def test_a_delta_holds_the_rows_that_were_pushed_since(tmp_path: Path):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(TWO, filled(TWO))
        push(client, TWO, 0)
        client.tables.push({"user": (range(5000), ones(range(5000)))}, hyper=HYPER)
        for step in (1, 2):
            client.save(tmp_path, step, options=DELTAS)
            client.tables.push({"user": (range(50), ones(range(50)))}, hyper=HYPER)
        client.save(tmp_path, 3, options=DELTAS)
    newest, _, full = inspect(tmp_path).steps
    assert [report.rows for report in newest.tables] == [50, 0]
    assert full.tables[0].rows == 5000
    assert newest.tables[0].nbytes == 50 * full.tables[0].nbytes // 5000


@pytest.mark.fault("F42")
@pytest.mark.parametrize("num_servers", [1, 2])
def test_evicted_rows_do_not_come_back_with_a_delta_and_no_other_is_lost(
    tmp_path: Path, num_servers: int
):
    manifest = with_tables(table(max_rows=400, when_full="lru", segments=4))
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for number in range(52):
            ids = np.arange(number * 10, number * 10 + 12)
            client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
            if number in (39, 51):  # full, and what a push then brings takes an older row's place
                client.save(tmp_path, number, options=DELTAS)
        expected = rows(client, manifest)
        evicted = sum(each.tables[0].evicted for each in client.stats())
    assert evicted > 0
    assert read_manifest(tmp_path).is_delta
    with cluster(num_servers=num_servers) as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.seed(manifest, filled(manifest))
        assert rows(client, manifest) == expected  # one server's share has room for all of it


def test_admission_goes_on_counting_where_it_was(tmp_path: Path):
    manifest = with_tables(table(admission=Admission(min_count=3)))
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for _ in range(2):
            client.tables.push({"user": (range(9), ones(range(9)))}, hyper=HYPER)
        client.save(tmp_path, 1)
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.seed(manifest, filled(manifest))
        assert rows(client, manifest) == {"user": {}}
        client.tables.push({"user": (range(9), ones(range(9)))}, hyper=HYPER)
        assert len(rows(client, manifest)["user"]) == 9


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_reset_optimizer_keeps_values_and_drops_slots(tmp_path: Path, num_servers: int):
    trained(tmp_path)
    asked = msgspec.structs.replace(
        TWO, tables=tuple(msgspec.structs.replace(each, rule=SGD()) for each in TWO.tables)
    )
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.seed(TWO, filled(TWO))
        values = client.tables.lookup({"user": range(500), "item": range(500)})
    with cluster(num_servers=num_servers) as bed:
        client = bed.client()
        with pytest.raises(CheckpointError, match=r"table user adagrad.*sgd.*reset_optimizer=True"):
            client.restore(tmp_path, like=RestoreOptions(manifest=asked))
        client.restore(tmp_path, like=RestoreOptions(manifest=asked, reset_optimizer=True))
        client.seed(asked, filled(asked))
        for name, found in client.tables.lookup({n: range(500) for n in values}).items():
            assert np.array_equal(found, values[name])
        ids = {int(n) for ids, _ in client.tables.scan("item", with_slots=True) for n in ids}
        client.tables.push({"item": (sorted(ids), ones(sorted(ids), 9).astype("f8"))}, hyper=HYPER)
        after = client.tables.lookup({"item": sorted(ids)})["item"]
        np.testing.assert_allclose(after, values["item"][sorted(ids)] - 0.1, rtol=1e-12, atol=1e-12)


def test_a_table_goes_on_at_another_rate_and_with_another_vector_for_unseen_ids(tmp_path: Path):
    saved = with_tables(table(rule=SGD()))
    spec = msgspec.structs.replace(
        saved.tables[0], learning_rate_multiplier=0.5, unseen=(1.0, 2.0, 3.0, 4.0)
    )
    asked = msgspec.structs.replace(saved, tables=(spec,))
    with cluster() as bed:
        (client,) = bed.workers(saved, filled(saved))
        client.tables.push({"user": ([1], ones([1]))}, hyper=HYPER)
        client.save(tmp_path, 1)
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path, like=RestoreOptions(manifest=asked))
        client.seed(asked, filled(asked))
        client.tables.push({"user": ([1], ones([1]))}, hyper=HYPER)
        ids = client.tables.route({"user": [1, 2]})["user"]
        found = np.empty((2, 4), np.float32)
        client.tables.lookup_into({"user": (ids, found)}, training=False)
        rate = HYPER.learning_rate
        assert ids.expand(found).tolist() == [
            pytest.approx([-1.5 * rate] * 4),
            list(spec.unseen),
        ]


@pytest.mark.fault("F42")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 5}, r"Only saved: table user float32\[4\].*Only asked: table user float32\[5\]"),
        ({"initializer": RandomNormal(0.0, 0.1)}, r"stddev=0.05.*stddev=0.1"),
        ({"seed": 4}, "seed 3.*seed 4"),
        ({"rule": SGD()}, r"rule of table user adagrad.*rule of table user sgd"),
        ({"name": "users"}, "Only asked: .*table users"),
    ],
)
def test_another_table_is_refused_with_both_sides(tmp_path: Path, changes, message: str):
    trained(tmp_path)
    user = msgspec.structs.replace(TWO.tables[0], **changes)
    asked = msgspec.structs.replace(TWO, tables=(user, TWO.tables[1]))
    with cluster() as bed, pytest.raises(CheckpointError, match=message):
        bed.client().restore(tmp_path, like=RestoreOptions(manifest=asked))


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_a_table_without_a_seed_takes_that_of_its_checkpoint(tmp_path: Path, is_asked_for: bool):
    """Versions before wrote 0 where nobody gave a seed; rows that come later begin as they did."""
    asked = with_tables(table("user", initializer=RandomNormal()), table("item"))
    seeded = tuple(msgspec.structs.replace(each, seed=0) for each in asked.tables)
    old = msgspec.structs.replace(asked, tables=seeded)
    with cluster() as bed:
        (client,) = bed.workers(old, filled(old))
        push(client, old, 1)
        client.save(tmp_path, 1)
        first = client.tables.lookup({"user": [7000]})["user"]
    with cluster() as bed:
        client = bed.client()
        like = RestoreOptions(manifest=asked if is_asked_for else None)
        assert manifest_to_serve(read_manifest(tmp_path, 1), like) == old
        client.restore(tmp_path, like=like)
        chief = bed.client(0, generation=1)
        chief.seed(asked, filled(asked))
        assert chief.manifest == client.manifest == old
        np.testing.assert_array_equal(chief.tables.lookup({"user": [7000]})["user"], first)
        push(chief, asked, 2)


@pytest.mark.attack("A19")
def test_any_flipped_byte_or_cut_of_a_table_is_found(tmp_path: Path):
    trained(tmp_path)
    path = tmp_path / "step-3" / "ps-1.data"
    whole = path.read_bytes()
    checkpoint = read_manifest(tmp_path, 3)
    for position in [*range(0, len(whole), 97), len(whole) - 1]:
        changed = bytearray(whole)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="digest"):
            verify(tmp_path, checkpoint)
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="the manifest says"):
        verify(tmp_path, checkpoint)
    path.write_bytes(whole)
    verify(tmp_path, checkpoint)


def forge(root: Path, change) -> None:
    """Change the index of ps-0 in step 3 and make all digests and sizes fit."""
    path, manifest_path = root / "step-3" / "ps-0.data", root / "step-3" / "manifest.json"
    checkpoint = form.decode_manifest(manifest_path.read_bytes(), "manifest")
    shard = checkpoint.shards[0]
    data = path.read_bytes()
    body, encoded = data[: -shard.index_nbytes], data[-shard.index_nbytes :]
    index = msgspec.msgpack.decode(encoded)
    change(index["tables"])
    encoded = msgspec.msgpack.encode(index)
    path.write_bytes(body + encoded)
    record = form.ShardRecord(0, len(body + encoded), len(encoded), digest(encoded))
    forged = msgspec.structs.replace(checkpoint, shards=(record, *checkpoint.shards[1:]))
    manifest_path.write_bytes(form.encode_manifest(forged))


@pytest.mark.attack("A19")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables.pop(), "has 4 segments of tables"),
        (lambda tables: tables.append(tables[0]), "has 6 segments of tables"),
        (lambda tables: tables[0].update(table=1 << 40), "segments of tables"),
        (lambda tables: tables[0].update(counts_nbytes=1 << 40), "Expected `int` <= "),
        (lambda tables: tables[0].update(counts_nbytes=1 << 20), "its parts make"),
        (lambda tables: tables[0]["pieces"][0].__setitem__(0, 1 << 40), "Expected `int` <= 16384"),
        (lambda tables: tables[0]["pieces"][0].__setitem__(0, 16384), "its parts make"),
        (lambda tables: tables[0]["pieces"][0].__setitem__(0, 0), "Expected `int` >= 1"),
        (lambda tables: tables[0].update(version=1), "has row versions"),
    ],
)
def test_hostile_claims_about_tables_are_refused_by_name(tmp_path: Path, change, message: str):
    trained(tmp_path)
    forge(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        verify(tmp_path, read_manifest(tmp_path, 3))


def test_tables_are_shown_and_exported(tmp_path: Path, capsys):
    expected = trained(tmp_path / "saves")
    assert main(["inspect", str(tmp_path / "saves")]) == 0
    text = capsys.readouterr().out
    assert "  table user: float32[4], rule adagrad, slots " in text
    assert " changed rows, " in text
    out = tmp_path / "out.npz"
    export_npz(tmp_path / "saves", read_manifest(tmp_path / "saves"), out, slots=True)
    with np.load(out, allow_pickle=False) as found:
        for name, by_id in expected.items():
            assert found[f"tables/{name}/ids"].tolist() == sorted(by_id)
            columns = [key for key in found if key.startswith(f"tables/{name}/values")]
            joined = np.concatenate([found[key] for key in columns], axis=1)
            assert [row.tobytes() for row in joined] == [by_id[number] for number in sorted(by_id)]


@pytest.mark.fault("F10")
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_rows_and_record_are_one_cut_while_pushes_go_on(tmp_path: Path, consistency: str):
    """Every push adds 1 to every row, so a row says how many pushes a segment's cut holds."""
    manifest = with_tables(table(), consistency=consistency)
    ids = np.arange(400)
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()
        ended = threading.Event()

        def train() -> None:
            while not ended.is_set():
                client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)

        worker = threading.Thread(target=train)
        worker.start()
        try:
            for step in range(5):
                saver.save(tmp_path, step, options=DELTAS)
        finally:
            ended.set()
            worker.join()
    with cluster(num_servers=2, job=bed.credentials.cluster_id) as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.seed(manifest, filled(manifest))
        for server in bed.servers:
            shard = server._service.life.loaded()
            for number, segment in enumerate(shard.tables.tables[0].segments):
                batch, _ = segment.dump(1000, 1000)
                unit = shard.tables._intake._first_units[0] + number
                cut = shard._log.snapshot()
                cut.note(unit)
                (session,) = cut.sessions()
                assert set(batch.rows[:, 0].tolist()) == {float(segment.version)}
                assert last_applied(session, unit) == segment.version


@pytest.mark.fault("F08")
def test_a_restarted_server_has_what_was_acknowledged_before_the_cut(tmp_path: Path):
    manifest = with_tables(table("user"), table("item", segments=3))
    ids = np.arange(300)
    grads = {"user": (ids, ones(ids)), "item": (ids, ones(ids))}
    with cluster("tcp", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for step in (1, 2):
            client.tables.push(grads, hyper=HYPER)
            client.tables.push({"item": grads["item"]}, hyper=HYPER)
            client.save(tmp_path, step, options=DELTAS)
        for _ in range(4):
            client.tables.push(grads, hyper=HYPER)
        port = bed.endpoints[1].port
        bed.servers[1].close()
        settings = ServerSettings(rank=1, num_servers=2, num_workers=1)
        bed.servers[1] = PSServer(settings, bed.credentials)
        bed.servers[1].bind_tcp("127.0.0.1", port)
        bed.servers[1].start_restoring(tmp_path)
        client.tables.push(grads, hyper=HYPER)
        found = client.tables.lookup({"user": ids, "item": ids})
        assert client.stats()[1].lost_updates == 4
    assert set(found["user"][:, 0].tolist()) == {7.0, 3.0}  # the first server's, the second's
    assert set(found["item"][:, 0].tolist()) == {9.0, 5.0}


@pytest.mark.fault("F10")
def test_a_save_that_is_given_up_is_followed_by_a_whole_one(tmp_path: Path, monkeypatch):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(TWO, filled(TWO))
        push(client, TWO, 0)
        client.save(tmp_path, 1, options=DELTAS)
        push(client, TWO, 1)

        def full(_file) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("ps.checkpoint.storage.LocalStorage.sync", lambda _, file: full(file))
            with pytest.raises(CheckpointError, match="No space left"):
                client.save(tmp_path, 2, options=DELTAS)
        push(client, TWO, 2)
        client.save(tmp_path, 3, options=DELTAS)
        expected = rows(client, TWO)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.restore(tmp_path, step=3)
        client.seed(TWO, filled(TWO))
        assert rows(client, TWO) == expected
