"""What holds no strings is left as it is; tests/system/keras/test_string_hash.py has those."""

from __future__ import annotations

import numpy as np

from tfos.keras.embedding.string_ids import with_hashed_strings


def test_what_is_no_string_is_left_to_others():
    for ids in ([1, 2], np.array([3]), [None], [1, "a"], [[1], [2, 3]]):
        assert with_hashed_strings(ids) is ids
