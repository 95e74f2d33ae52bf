"""Rows that a training begins with: of a saved model, an export, a plain Keras model."""

from __future__ import annotations

import functools
import gc
import logging
import pathlib
import weakref
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from ps.errors import IdError
from ps.string_ids.ids import with_hashed_strings
from tests.support.keras_training import Context, Servers, serving, together
from tests.support.ps_cluster import cluster, filled
from tests.support.tables import table, table_kernels_loaded, with_tables
from tfos.errors import (
    ExportError,
    ManifestMismatch,
    ServerPhaseError,
    SettingsError,
    UnsupportedModel,
)
from tfos.keras import Embedding, rows_of
from tfos.keras.embedding import loading
from tfos.keras.embedding.loading import LAYERS_NAME, MAX_LOADS, METADATA_NAME
from tfos.keras.embedding.sources import LoadedRows
from tfos.keras.fit.distribute import distribute
from tfos.keras.fit.table_export import export_with_tables
from tfos.keras.step.tables import ServerRows
from tfos.serving import read_rows

tf = pytest.importorskip("tensorflow")

__all__ = ["table_kernels_loaded"]
pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(230),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]
load_rows = functools.partial(loading.load_rows, save=lambda: None)
load_layer_rows = functools.partial(loading.load_layer_rows, save=lambda: None)
DIM = 4
X = np.random.default_rng(0).integers(0, 40, (128, 3))
Y = (X.sum(1) > 60).astype("float32")


def make_model(dtype: str = "int64", **settings) -> keras.Model:
    keras.utils.set_random_seed(7)
    ids = keras.Input((3,), dtype=dtype)
    vectors = keras.layers.Flatten()(Embedding(DIM, table="user", **settings)(ids))
    return compiled(keras.Model(ids, keras.layers.Dense(1, "sigmoid", name="out")(vectors)))


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", jit_compile=False)
    return model


def loaded_from(path: pathlib.Path) -> keras.Model:
    return compiled(keras.models.load_model(path, compile=False))


def fitted(model: keras.Model, rows: slice, context: Context) -> keras.Model:
    distribute(model, context, consistency="sync")
    model.fit(X[rows], Y[rows], batch_size=16, shuffle=False, verbose=0)
    return model


def table_of(cluster: Servers) -> dict[int, bytes]:
    found = cluster.contexts[0].client.tables.scan("user", with_slots=True)
    return {
        int(number): row.tobytes()
        for ids, rows in found
        for number, row in zip(ids, rows, strict=True)
    }


def test_a_saved_model_goes_on_with_the_numbers_of_an_unbroken_run(tmp_path: pathlib.Path):
    first, rest = slice(0, 64), slice(64, 128)
    with serving() as cluster:
        model = fitted(make_model(), first, cluster.contexts[0])
        model.save(tmp_path / "model.keras")
        model.fit(X[rest], Y[rest], batch_size=16, shuffle=False, verbose=0)
        expected, rows = model.get_weights(), table_of(cluster)
    loaded = loaded_from(tmp_path / "model.keras")
    with serving(num_servers=2) as cluster:
        fitted(loaded, rest, cluster.contexts[0])
        assert table_of(cluster) == rows
        for one, other in zip(loaded.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def two_heads(shared: keras.layers.Layer, *more: keras.layers.Layer) -> list[keras.Model]:
    ids = keras.Input((3,), dtype="int64")
    vectors = keras.layers.Flatten()(shared(ids))
    for layer in more:
        vectors = layer(vectors)
    outs = [keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")(vectors) for _ in "ab"]
    return [compiled(keras.Model(ids, out)) for out in outs]


def fit_here(model: keras.Model) -> list[float]:
    return model.fit(X, Y, batch_size=16, shuffle=False, epochs=2, verbose=0).history["loss"]


def test_models_that_share_a_layer_train_its_rows_one_after_the_other_as_in_keras():
    plain = two_heads(keras.layers.Embedding(40, DIM, keras.initializers.Constant(0.1)))
    models = two_heads(Embedding(DIM, initializer=keras.initializers.Constant(0.1)))
    for ours, theirs in zip(models, plain, strict=True):
        np.testing.assert_allclose(fit_here(ours), fit_here(theirs), rtol=1e-5)
    for ours, theirs in zip(models, plain, strict=True):
        np.testing.assert_allclose(
            ours.predict(X, verbose=0), theirs.predict(X, verbose=0), rtol=1e-5
        )
        np.testing.assert_allclose(ours.predict_on_batch(X), theirs.predict_on_batch(X), rtol=1e-5)
    with pytest.raises(
        UnsupportedModel, match=r"another model with the layer 'embedding.*' was fit"
    ):
        fit_here(models[0])
    anew = [compiled(keras.Model(each[0].inputs, each[0].outputs)) for each in (models, plain)]
    del models
    gc.collect()  # the rows are still where the second one has trained them
    np.testing.assert_allclose(fit_here(anew[0]), fit_here(anew[1]), rtol=1e-5)


def test_a_model_whose_dense_layers_another_has_trained_names_it_and_the_way_out():
    models = two_heads(Embedding(DIM), keras.layers.Dense(2))
    for model in models:
        fit_here(model)
    with pytest.raises(
        UnsupportedModel, match=r"another model with the layer .* Rebuild and compile"
    ):
        fit_here(models[0])
    asked = (lambda: models[0].predict(X), lambda: models[0].predict_on_batch(X))
    for ask in (*asked, lambda: models[0].test_on_batch(X, Y)):
        with pytest.raises(
            UnsupportedModel, match=r"another model that shares the layer .* rebuild"
        ):
            ask()
    with pytest.raises(
        UnsupportedModel, match=r"another model with the layer .* Rebuild and compile"
    ):
        models[0].train_on_batch(X, Y)
    models[1].predict(X, verbose=0)  # nothing has pulled over the values that it has trained
    anew = compiled(keras.Model(models[0].inputs, models[0].outputs))
    before = anew.predict(X, verbose=0)
    fit_here(anew)
    assert (anew.predict(X, verbose=0) != before).any()


def test_rows_whose_servers_have_ended_are_refused_by_the_layers_name():
    layer = Embedding(DIM, name="who", table="user")
    with serving() as cluster:
        fitted(two_heads(layer)[0], slice(0, 16), cluster.contexts[0])
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=r"'who' had the rows .* have ended.* a new Em"):
            fit_here(two_heads(layer)[0])


def test_a_first_fit_that_breaks_off_leaves_a_layer_its_rows(monkeypatch):
    layer = Embedding(DIM)
    layer.bind(LoadedRows(np.arange(9), np.ones((9, DIM), "float32"), layer.settings))
    model = two_heads(layer)[0]
    expected = model.predict(X, verbose=0)
    with monkeypatch.context() as patch:
        patch.setattr("tfos.keras.fit.distribute._install", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit_here(model)
    assert isinstance(layer.source, LoadedRows)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    fit_here(model)


def test_all_that_layers_of_one_table_have_begins_it_and_more_may_be_loaded(monkeypatch):
    layers = [Embedding(DIM, table="user") for _ in range(3)]
    rest = [Embedding(DIM, table="item", trainable=False)]
    for layer, x in zip([*layers[:2], *rest], (0, 7, 3), strict=True):
        two_heads(layer)[0].fit(np.full((8, 3), x), Y[:8], verbose=0)
    layers[2].bind(layers[1].source)
    trained = [layer(np.array(x)).numpy() for layer, x in zip(layers, (0, 7), strict=False)]
    dumps = []
    dump = ServerRows.dump

    def noting_dump(self, table, limit_bytes):
        dumps.append(table)
        return dump(self, table, limit_bytes)

    monkeypatch.setattr(ServerRows, "dump", noting_dump)
    ids = keras.Input((3,), dtype="int64")
    vectors = keras.layers.Concatenate()([layer(ids) for layer in (*layers, *rest)])
    model = compiled(keras.Model(ids, keras.layers.Dense(1)(vectors)))
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        assert dumps == ["user", "user", "item"]
        assert sorted(table_of(cluster)) == [0, 7]
        client = cluster.contexts[0].client
        np.testing.assert_array_equal(client.tables.lookup({"user": [0, 7]})["user"], trained)
        for table, added in (("item", 2), ("user", 1), ("user", 0)):
            new = [([0, 1], np.ones((2, DIM), "float32"))]
            assert load_rows(client, table, new, is_chief=True) == added


def test_the_server_of_a_lone_model_ends_with_the_model_that_was_asked_too():
    model = make_model()
    fit_here(model)
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    context = weakref.ref(model.__dict__["_tfos_trainer"].ctx)
    assert context() is not None
    del model
    gc.collect()
    assert context() is None


def test_a_function_of_a_model_that_is_gone_says_what_to_keep():
    def answers() -> Any:
        model = make_model()
        return tf.function(model).get_concrete_function(tf.TensorSpec((None, 3), tf.int64))

    function = answers()
    gc.collect()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Embedding .*embedding.*keep its model"
    ):
        function(tf.constant(X[:2]))


@pytest.mark.parametrize("dtype", ["int64", "string"])
def test_text_is_no_id_of_a_table_that_trains_integers(dtype: str):
    model = make_model(dtype)
    text = [(["17"], np.ones((1, DIM), "float32"))]
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        x = X[:16] if dtype == "int64" else tf.strings.as_string(X[:16])
        model.fit(x, Y[:16], verbose=0)
        if dtype == "string":
            assert load_rows(cluster.contexts[0].client, "user", text, is_chief=True) in (0, 1)
            return
        with pytest.raises(IdError, match="'user' was trained with integers as ids, got the text"):
            load_rows(cluster.contexts[0].client, "user", text, is_chief=True)


def test_other_workers_begin_when_the_chief_has_loaded(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setattr("tfos.keras.embedding.loading.LOOK_S", 0.01)
    with serving() as cluster:
        fitted(make_model(), slice(0, 64), cluster.contexts[0]).save(tmp_path / "model.keras")
        rows = table_of(cluster)
    seen = {}

    def work(rank: int) -> None:
        model = loaded_from(tmp_path / "model.keras")
        distribute(model, cluster.contexts[rank])
        seen[rank] = cluster.contexts[rank].client.tables.lookup({"user": list(rows)})["user"]

    with serving(num_workers=2) as cluster:
        together(work, 2)
        assert {number: row.tobytes() for number, row in zip(rows, seen[1], strict=True)} == rows
        assert cluster.contexts[0].client.metadata()[LAYERS_NAME] == {"user": "loaded"}


@pytest.mark.parametrize("states", [{}, {"user": "loaded"}], ids=["never loaded", "of layers"])
def test_a_resumed_training_keeps_the_rows_of_its_checkpoint(
    tmp_path: pathlib.Path, caplog, states
):
    rows = [(np.arange(500), np.ones((500, DIM), "float32"))]
    with serving() as cluster:
        client = (
            fitted(make_model(), slice(0, 16), cluster.contexts[0]).__dict__["_tfos_trainer"].client
        )
        client.set_metadata(LAYERS_NAME, states)
        client.save(tmp_path, 3)
    caplog.set_level(logging.INFO, "tfos")
    for _ in range(2):
        with serving() as cluster:
            client = cluster.contexts[0].client
            client.restore(tmp_path)
            before = table_of(cluster)
            distribute(make_model(), cluster.contexts[0], consistency="sync")
            assert load_rows(client, "user", rows, is_chief=True) == 0
            assert table_of(cluster) == before
            assert client.metadata()[METADATA_NAME] == {"user": "loaded"}  # others wait for it
            client.save(tmp_path, None)
    assert "'user': no rows are loaded: the training resumes from step 3, whose" in caplog.text
    assert "loaded before, in this training or in the one that it resumes" in caplog.text


@pytest.mark.fault("F08")
@pytest.mark.usefixtures("table_kernels_loaded")
@pytest.mark.parametrize("resumes", [False, True])
def test_a_server_that_is_restarted_within_a_run_resumes_nothing(
    tmp_path: pathlib.Path, resumes: bool
):
    """Only the run itself does: whether it does is known after a restart too."""
    manifest = with_tables(table())
    rows = [(np.arange(500), np.ones((500, DIM), "float32"))]
    if resumes:
        with cluster("inproc") as bed:
            bed.workers(manifest, filled(manifest))[0].save(tmp_path, 3)
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        if resumes:
            client.restore(tmp_path)
        else:
            client.seed(manifest, filled(manifest))
        client.save(tmp_path, 7)
        for server in range(2):
            bed.restart(server, tmp_path, generation=1)
        assert load_rows(client, "user", rows, is_chief=True) == (0 if resumes else 500)
        assert {each.resumed_step for each in client.stats()} == ({3} if resumes else {-1})


@pytest.mark.fault("F08")
@pytest.mark.usefixtures("table_kernels_loaded")
def test_a_run_resumes_what_servers_that_are_started_by_hand_restore(tmp_path: pathlib.Path):
    manifest = with_tables(table())
    rows = [(np.arange(500), np.ones((500, DIM), "float32"))]
    with cluster("inproc") as bed:
        bed.workers(manifest, filled(manifest))[0].save(tmp_path, 3)
    with cluster("inproc") as bed:
        bed.restart(0, tmp_path, by_hand=True)
        client = bed.client()
        client.attach()
        assert load_rows(client, "user", rows, is_chief=True) == 0
        assert [each.resumed_step for each in client.stats()] == [3]


@pytest.mark.fault("F08")
@pytest.mark.usefixtures("table_kernels_loaded")
def test_a_worker_that_comes_late_hears_that_rows_are_loaded_though_ps_0_has_lost_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tfos.keras.embedding.loading.LOOK_S", 0.01)
    monkeypatch.setattr("tfos.keras.embedding.loading.LOAD_TIMEOUT_S", 30.0)
    monkeypatch.setattr("ps.client.rendezvous.PROBE_PERIOD_S", 0.05)
    manifest = with_tables(table())
    rows = [(np.arange(50), np.ones((50, DIM), "float32"))]
    with cluster("inproc", num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        clients[0].save(tmp_path, 0)
        assert load_rows(clients[0], "user", rows, is_chief=True) == 50

        def work(rank: int) -> None:
            if rank == 1:
                bed.restart(0, tmp_path, generation=1)
                load_rows(clients[1], "user", rows, is_chief=False)
            clients[rank].rendezvous("begin", b"", timeout_s=60.0)

        together(work, 2)


ROWS = [(np.arange(at, at + 50), np.ones((50, DIM), "float32")) for at in (0, 50)]
ALL_IDS = set(range(100))


def ids_on(client) -> set[int]:
    return {int(number) for ids, _ in client.tables.scan("user") for number in ids}


@pytest.mark.fault("F08")
@pytest.mark.usefixtures("table_kernels_loaded")
def test_rows_are_in_a_checkpoint_before_they_count_and_come_again_after_a_restart(
    tmp_path: pathlib.Path, caplog
):
    manifest = with_tables(table())
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        client.seed(manifest, filled(manifest))
        client.save(tmp_path, 0)
        saves: list[str] = []

        def save() -> str:
            if not saves:
                bed.restart(1, tmp_path, generation=1)  # behind the load, without its rows
            assert client.metadata()[METADATA_NAME] == {"user": "loading"}
            saves.append(client.save(tmp_path, None))
            return ""

        load_rows(client, "user", ROWS, is_chief=True, save=save)
        assert len(saves) == 2
        assert "'user': ps:1 restarted: its rows are loaded again" in caplog.text
        assert client.metadata()[METADATA_NAME] == {"user": "loaded"}
        for rank in range(2):
            bed.restart(rank, tmp_path, generation=2)
        assert ids_on(client) == ALL_IDS
        assert load_rows(client, "user", ROWS, is_chief=True, save=save) == 0


@pytest.mark.fault("F08")
@pytest.mark.usefixtures("table_kernels_loaded")
@pytest.mark.parametrize("is_restarted_within", [True, False])
def test_rows_that_may_be_lost_are_told_and_loaded_by_the_next_call(
    tmp_path: pathlib.Path, caplog, is_restarted_within: bool
):
    """A generator is read once; or the directory takes no save, and the restart comes later."""
    manifest = with_tables(table())
    with cluster("inproc", num_servers=2, num_workers=2) as bed:
        client, other = bed.workers(manifest, filled(manifest))
        client.save(tmp_path, 0)

        def batches():
            yield ROWS[0]
            if is_restarted_within:
                bed.restart(1, tmp_path, generation=1)
            yield ROWS[1]

        def save() -> str:
            return "" if is_restarted_within else "OSError: disk full"

        load_rows(client, "user", batches(), is_chief=True, save=save)
        load_rows(other, "user", (), is_chief=False)  # nobody waits for what comes no more
        if is_restarted_within:
            assert "ps:1 restarted while rows were loaded, and has only those" in caplog.text
        else:
            assert "'user': its rows are loaded but were not saved: OSError: disk" in caplog.text
            bed.restart(1, tmp_path, generation=1)
        assert ids_on(client) < ALL_IDS
        assert load_rows(client, "user", ROWS, is_chief=True) > 0
        assert ids_on(client) == ALL_IDS
        assert client.metadata()[METADATA_NAME] == {"user": "loaded"}


@pytest.mark.usefixtures("table_kernels_loaded")
def test_nobody_waits_for_rows_whose_load_the_chief_has_given_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A program may begin with the rows of an export if there is one."""
    monkeypatch.setattr("tfos.keras.embedding.loading.LOAD_TIMEOUT_S", 1.0)
    manifest = with_tables(table())
    with cluster("inproc", num_workers=2) as bed:
        chief, other = bed.workers(manifest, filled(manifest))
        with pytest.raises(ExportError, match="no complete export"):
            load_rows(chief, "user", read_rows(str(tmp_path), "user"), is_chief=True)
        assert load_rows(other, "user", (), is_chief=False) == 0
        assert load_rows(chief, "user", ROWS, is_chief=True) == len(ALL_IDS)


class RestartingServers:
    """A client of one server that was started again whenever rows were loaded."""

    def __init__(self) -> None:
        self.num_loads = 0
        self.notes: dict[str, dict[str, str]] = {}
        self.manifest = with_tables(table())
        self.tables = self

    def route(self, ids) -> None:
        assert list(ids) == ["user"]

    def load_rows(self, name: str, ids, rows, *, named) -> int:
        self.num_loads += 1
        return len(rows)

    def stats(self) -> list:
        return [SimpleNamespace(server=3, start=self.num_loads, resumed_step=-1)]

    def metadata(self) -> dict[str, dict[str, str]]:
        return dict(self.notes)

    def set_metadata(self, name: str, value: dict[str, str], *, of_run: bool) -> None:
        assert of_run
        self.notes[name] = value


def test_a_server_that_never_lasts_ends_the_loads_of_one_call(caplog):
    servers = RestartingServers()
    assert load_rows(servers, "user", ROWS[:1], is_chief=True, save=str) == 50  # each id once
    assert servers.num_loads == MAX_LOADS
    assert servers.notes[METADATA_NAME] == {"user": "unsafe"}
    assert caplog.text.count("ps:3 restarted") == MAX_LOADS
    assert "Call load_rows on the chief again" in caplog.text


class ResumedServers(RestartingServers):
    """Those of a run that resumes from step 3, which are not started again."""

    def stats(self) -> list:
        return [SimpleNamespace(server=3, start=0, resumed_step=3)]


@pytest.mark.parametrize("state", ["loading", "unsafe"])
@pytest.mark.parametrize("name", [METADATA_NAME, LAYERS_NAME])
def test_a_run_that_resumes_makes_whole_the_load_that_was_not_and_only_that(name: str, state: str):
    servers = ResumedServers()
    servers.notes[name] = {"user": state}
    layer = Embedding(DIM, table="user")
    layer.bind(LoadedRows(np.arange(9), np.ones((9, DIM), "float32"), layer.settings))
    load_layer_rows([layer], servers, is_chief=True)
    assert bool(servers.num_loads) == (name == LAYERS_NAME)
    expected = len(ALL_IDS) if name == METADATA_NAME else 0
    assert load_rows(servers, "user", ROWS, is_chief=True) == expected


class KeptIterator:
    """A source that can be iterated again, and then has no more: a reader around a cursor."""

    def __init__(self) -> None:
        self._iterator = iter(ROWS)

    def __iter__(self):
        return self._iterator


def test_a_source_that_comes_once_does_not_count_as_loaded_again(caplog):
    servers = RestartingServers()
    assert load_rows(servers, "user", KeptIterator(), is_chief=True, save=str) == len(ALL_IDS)
    assert servers.notes[METADATA_NAME] == {"user": "unsafe"}
    assert "ps:3 restarted while rows were loaded, and has only those" in caplog.text


def test_rows_of_exports_and_of_plain_models_begin_a_table(tmp_path: pathlib.Path):
    with serving() as cluster:
        model = fitted(make_model(), slice(0, 64), cluster.contexts[0])
        whole = export_with_tables(model, tmp_path / "x", cluster.contexts[0], tables="beside")
        rows = table_of(cluster)
    with serving() as cluster:
        client = cluster.contexts[0].client
        with pytest.raises(ServerPhaseError, match=r"after ctx\.distribute"):
            load_rows(client, "user", read_rows(whole, "user"), is_chief=True)
        distribute(make_model(), cluster.contexts[0])
        with pytest.raises(ManifestMismatch, match="'item'"):
            load_rows(client, "item", read_rows(whole, "user"), is_chief=True)
        twice = read_rows(whole, "user")
        assert len(list(twice)) == len(list(twice)) > 0
        assert load_rows(client, "user", twice, is_chief=True) == len(rows)
        assert table_of(cluster) == rows
    plain = keras.Sequential(
        [
            keras.Input((), dtype="string"),
            keras.layers.StringLookup(vocabulary=["a", "b"], mask_token="", name="names"),
            keras.layers.Embedding(4, DIM, name="vectors"),
        ]
    )
    plain.save(tmp_path / "plain.keras")
    with serving() as cluster:
        client = cluster.contexts[0].client
        distribute(make_model("string"), cluster.contexts[0])
        given = rows_of(tmp_path / "plain.keras", "vectors", "names")
        assert len(list(given)) == 1
        numbered = rows_of(tmp_path / "plain.keras", "vectors")
        with pytest.raises(SettingsError, match=r"'user' has strings .* numbered from 0: .*lookup"):
            load_rows(client, "user", numbered, is_chief=True)
        twice_b = [(["a", "b", "b"], np.zeros((3, DIM), "float32"))]
        with pytest.raises(IdError, match="id 'b' occurs twice"):
            load_rows(client, "user", twice_b, is_chief=True)
        assert load_rows(client, "user", given, is_chief=True) == 2
        tf_rows = plain(tf.constant(["a", "b"])).numpy()
        found = client.tables.lookup({"user": with_hashed_strings(["a", "b"])})["user"]
        np.testing.assert_array_equal(found, tf_rows)


def test_layers_of_a_plain_model_are_named_where_they_do_not_fit():
    plain = keras.Sequential(
        [
            keras.Input((), dtype="int64"),
            keras.layers.IntegerLookup(vocabulary=[7, 9], name="ids"),
            keras.layers.Embedding(2, DIM, name="small"),
        ]
    )
    (pair,) = rows_of(plain, "small")
    assert list(pair[0]) == [0, 1]
    assert pair[1].shape == (2, DIM)
    for arguments, message in [
        (("big",), r"has 0 layers 'big' that are Embedding, expected 1; it has 'small'"),
        (("small", "names"), "IntegerLookup or StringLookup, expected 1; it has 'ids'"),
        (("small", "ids"), r"numbers 3 ids, the Embedding 'small' has 2 rows"),
    ]:
        with pytest.raises(SettingsError, match=message):
            list(rows_of(plain, *arguments))
    plain.get_layer("ids").output_mode = "multi_hot"
    with pytest.raises(SettingsError, match="output_mode='multi_hot', which numbers no rows"):
        list(rows_of(plain, "small", "ids"))


def test_rows_of_a_plain_model_are_the_vectors_that_it_gives():
    def ones() -> keras.Model:
        layer = keras.layers.Embedding(2, DIM, "ones", name="small")
        return keras.Sequential([keras.Input((), dtype="int64"), layer])

    tuned, quantized = ones(), ones()
    layer = tuned.get_layer("small")
    layer.enable_lora(1, a_initializer="ones", b_initializer="ones")
    ((_, rows),) = rows_of(tuned, "small")
    np.testing.assert_array_equal(rows, tuned.predict(np.arange(2), verbose=0))
    assert (rows > 1).all()
    quantized.get_layer("small").quantize("int8")
    with pytest.raises(SettingsError, match=r"'small' is quantized \(int8\).*before quantize"):
        list(rows_of(quantized, "small"))
