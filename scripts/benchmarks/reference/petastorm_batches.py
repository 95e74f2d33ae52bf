"""A Parquet file read by petastorm, with its own interpreter: prints rows and seconds."""

from __future__ import annotations

import sys
import time

from petastorm import make_batch_reader


def main() -> None:
    rows, begun_s = 0, time.perf_counter()
    url = f"file://{sys.argv[1]}"
    with make_batch_reader(url, num_epochs=1, workers_count=1, shuffle_row_groups=False) as reader:
        for batch in reader:
            rows += len(batch[0])
    print(rows, time.perf_counter() - begun_s)


if __name__ == "__main__":
    main()
