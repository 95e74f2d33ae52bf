"""Sparse tables without Spark and TensorFlow: factors of users and items, learned by two workers.

python examples/ps_tables.py

Ratings of 64-bit user ids are made from hidden factors. Two servers hold both tables; two workers
(threads here, processes as well) look the rows of their batch up, compute gradients and push them.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from ps import Hyper, Manifest, PSClient, PSServer, ServerSettings, TableSpec, initializers, rules
from rpc import Credentials, Identity, Role

NUM_WORKERS, NUM_SERVERS, STEPS, BATCH = 2, 2, 200, 512
FACTORS = initializers.RandomNormal(stddev=0.5)
MANIFEST = Manifest(
    groups=(),
    tables=(
        TableSpec(name="user", dim=4, rule=rules.Adagrad(), initializer=FACTORS, id_kind="uint64"),
        TableSpec(name="item", dim=4, rule=rules.Adagrad(), initializer=FACTORS, max_rows=10_000),
    ),
)
RATE = Hyper(learning_rate=0.2)


class Ratings:
    """Ratings: user, item and score; the hidden factors are never shown to a worker."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.users = random.integers(0, 2**64, 300, dtype=np.uint64)
        self.factors = random.standard_normal((300, 3)), random.standard_normal((200, 3))

    def batch(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        user, item = random.integers(0, 300, BATCH), random.integers(0, 200, BATCH)
        rating = np.sum(self.factors[0][user] * self.factors[1][item], axis=1)
        return self.users[user], item, rating.astype(np.float32)


def work(client: PSClient, ratings: Ratings) -> None:
    random = np.random.default_rng(client.identity.rank)
    for step in range(STEPS):
        users, items, rating = ratings.batch(random)
        ids = client.tables.route({"user": users, "item": items})
        rows = client.tables.lookup(ids)
        error = np.sum(rows["user"] * rows["item"], axis=1) - rating
        gradients = {
            "user": (ids["user"], error[:, None] * rows["item"] / 8),
            "item": (ids["item"], error[:, None] * rows["user"] / 8),
        }
        client.tables.push(gradients, hyper=RATE)
        if step % 50 == 0 or step == STEPS - 1:
            print(f"worker:{client.identity.rank} step {step} error {np.mean(error**2):.4f}")


def main() -> int:
    credentials, ratings = Credentials.generate(), Ratings()
    servers = []
    for rank in range(NUM_SERVERS):
        place = ServerSettings(rank=rank, num_servers=NUM_SERVERS, num_workers=NUM_WORKERS)
        server = PSServer(place, credentials)
        server.bind_tcp("127.0.0.1")
        server.start()
        servers.append(server)
    endpoints = [server.endpoint for server in servers]
    clients = [
        PSClient(endpoints, credentials, Identity(Role.WORKER, rank), num_workers=NUM_WORKERS)
        for rank in range(NUM_WORKERS)
    ]
    clients[0].seed(MANIFEST, {})
    clients[1].attach()
    threads = [threading.Thread(target=work, args=(client, ratings)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    users, items, rating = ratings.batch(np.random.default_rng(99))
    rows = clients[0].tables.lookup({"user": users, "item": items})
    error = float(np.mean((np.sum(rows["user"] * rows["item"], axis=1) - rating) ** 2))
    for stats in clients[0].stats():
        sizes = ", ".join(f"{table.name} {table.rows} rows" for table in stats.tables)
        print(f"ps:{stats.server} {sizes}")
    print(f"mean squared error {error:.4f} where guessing 0 has {float(np.mean(rating**2)):.4f}")
    for part in (*clients, *servers):
        part.close()
    return 0 if error < 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
