"""Specs of tensors from a peer: each lie is refused and named before memory is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import LimitExceeded, ProtocolError
from rpc.limits import Limits
from rpc.tensor import ITEM_BYTES, MAX_RANK, TensorSpec, check_specs


def spec(name: str = "w", dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def test_bytes_of_legal_specs_add_up():
    specs = [spec("a"), spec("b", "int8", ()), spec("c", "float64", (5, 0, 7)), spec("d", "bool")]
    assert check_specs(specs, Limits()) == 24 + 1 + 0 + 6
    assert sum(one.nbytes for one in specs) == 31
    assert check_specs([], Limits()) == 0


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"bfloat16"}))
def test_item_sizes_are_numpys(dtype):
    assert np.dtype(dtype).itemsize == ITEM_BYTES[dtype]


@pytest.mark.attack("A09")
@pytest.mark.parametrize(
    ("shape", "error", "says"),
    [
        ((2**40, 2**40), LimitExceeded, "overflows at axis 1"),
        ((2**63,), LimitExceeded, "overflows at axis 0"),
        ((0, 2**40, 2**40), LimitExceeded, "overflows at axis 2"),
        ((2**31, 2**31, 2**31, 0), LimitExceeded, "overflows"),
        ((-1,), ProtocolError, "dimension -1 at axis 0"),
        ((3, -(2**63)), ProtocolError, "at axis 1"),
        ((1,) * (MAX_RANK + 1), LimitExceeded, "rank 33, at most 32"),
        ((1,) * 1000, LimitExceeded, "rank 1000"),
        ((2**40,), LimitExceeded, "max_payload_bytes"),
    ],
)
def test_shape_bombs_are_refused(shape, error, says):
    with pytest.raises(error, match=says) as caught:
        check_specs([spec("kernel", shape=shape)], Limits())
    assert "kernel" in str(caught.value)


@pytest.mark.attack("A10")
def test_count_and_name_bombs_are_refused():
    limits = Limits(max_tensors=3)
    with pytest.raises(LimitExceeded, match="4 tensors exceed max_tensors=3"):
        check_specs([spec(str(index)) for index in range(4)], limits)
    with pytest.raises(LimitExceeded, match=r"name of tensor 0 has 1000000 bytes"):
        check_specs([spec("n" * 1_000_000)], limits)
    with pytest.raises(ProtocolError, match="name 'w' stands twice"):
        check_specs([spec(), spec()], limits)
    with pytest.raises(LimitExceeded, match="max_payload_bytes=100"):
        check_specs([spec(str(index)) for index in range(5)], Limits(max_payload_bytes=100))


@pytest.mark.attack("A07")
@pytest.mark.parametrize("dtype", ["object", "O", "V8", "float128", "str", "", "x" * 10_000])
def test_unknown_dtypes_are_refused(dtype):
    with pytest.raises(ProtocolError, match=r"dtype of 'w'.*allowed: bool") as caught:
        check_specs([spec(dtype=dtype)], Limits())
    assert len(str(caught.value)) < 300


@pytest.mark.attack("A09")
@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            TensorSpec,
            st.text(max_size=5),
            st.sampled_from([*ITEM_BYTES, "object", "float"]),
            st.lists(st.integers(-(2**65), 2**65) | st.integers(0, 9), max_size=40).map(tuple),
        ),
        max_size=6,
    )
)
def test_any_specs_are_checked_or_refused(specs):
    try:
        total = check_specs(specs, Limits())
    except ProtocolError:
        return
    assert total == sum(one.nbytes for one in specs) <= Limits().max_payload_bytes
    assert all(dim >= 0 for one in specs for dim in one.shape)
