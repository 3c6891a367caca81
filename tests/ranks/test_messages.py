"""Messages between ranks: every type arrives as it was sent, and no other type is sent."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from tests.helpers.hostile import Trap
from trainer.base.errors import (
    LaunchError,
    LostPeerError,
    NonFiniteError,
    TrainerError,
    UsageError,
    error_of_values,
    error_to_values,
)
from trainer.ranks.messages import decode, encode

VALUES = [
    None,
    True,
    -(2**70),
    1e-320,
    math.inf,
    "\u2028 \ud800 \x1b[31m",
    [1, (2, [3, ()])],
    {"a": {1: "b", "1": (None,)}, "tuple": [], "tensor": "0"},
]


@pytest.mark.parametrize("value", VALUES)
def test_plain_values_arrive_with_their_types(value):
    found = decode(encode(value))
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_nan_arrives():
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True)])
def test_numpy_scalars_become_python_scalars(value):
    found = decode(encode([value]))[0]
    assert type(found) is type(value.item())
    assert found == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_arrive_bit_by_bit(dtype):
    base = torch.arange(12).reshape(3, 4).to(dtype)
    sent = {"view": base.T[1:], "same": (base, base), "empty": base[:0], "scalar": base[1, 1]}
    found = decode(encode(sent))
    assert torch.equal(found["view"], base.T[1:])
    assert torch.equal(found["same"][0], base)
    assert torch.equal(found["same"][1], base)
    assert found["empty"].shape == (0, 4)
    assert (found["scalar"].dtype, found["scalar"].shape) == (dtype, ())


@pytest.mark.parametrize("value", [{1.5: "a"}, {(1, 2): "a"}, {1, 2}, object(), b"bytes", torch.float32, {True: 1}])
def test_another_type_is_refused(value):
    with pytest.raises(TypeError, match="a message between ranks cannot hold"):
        encode([value])


def test_a_pickle_is_no_message(tmp_path):
    with pytest.raises(ValueError, match="a message between ranks"):
        decode(pickle.dumps(Trap(tmp_path / "marker")))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (TrainerError, TrainerError),
        (UsageError, UsageError),
        (LaunchError, LaunchError),
        (NonFiniteError, NonFiniteError),
        (LostPeerError, LostPeerError),
    ],
)
def test_errors_keep_their_exit_code(sent, received):
    error = sent("the disk is full")
    found = error_of_values(decode(encode(error_to_values(error))))
    assert (type(found), str(found), found.exit_code) == (received, "the disk is full", error.exit_code)
