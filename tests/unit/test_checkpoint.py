"""A checkpoint gives back what it was given, bit for bit, or says that it cannot."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from muster.errors import BadCheckpoint
from muster.restore.checkpoint import load, save

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def equal(a: Any, b: Any) -> bool:
    """Same types and same bits, in the same order."""
    if type(a) is not type(b):
        return False
    if torch.is_tensor(a):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and (
            not a.numel()
            or torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
        )
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return equal(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return (
        struct.pack(">d", a) == struct.pack(">d", b) if isinstance(a, float) else a == b
    )


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(
        st.binary(
            min_size=math.prod(shape) * dtype.itemsize,
            max_size=math.prod(shape) * dtype.itemsize,
        )
    )
    if not data:
        return torch.empty(shape, dtype=dtype)
    data = bytes(byte & 1 for byte in data) if dtype == torch.bool else data
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    )


scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(0, 1 << 128) | st.floats() | st.binary()
    | st.text(st.characters(exclude_categories=()))  # with surrogates
)  # fmt: skip
array_dtypes = (
    npst.scalar_dtypes()
    | npst.unicode_string_dtypes(max_len=3)
    | npst.byte_string_dtypes(max_len=3)
)  # both byte orders
arrays = array_dtypes.flatmap(
    lambda dtype: npst.arrays(
        dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=3)
    )
)
numbers = arrays.filter(lambda array: array.size > 0).map(
    lambda array: array.reshape(-1)[0]
)
keys = st.text() | st.integers() | st.lists(st.text(), max_size=3).map(tuple)
states = st.recursive(
    scalars | tensors() | arrays | numbers,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint") / "state.safetensors"


@given(state=states)
@example(state=[1 << 20_000, -(1 << 63), (1 << 63) - 1, math.inf, -math.inf, -0.0, ()])
@settings(max_examples=100, deadline=None)
def test_a_state_comes_back_with_its_types_its_order_and_every_bit(file, state):
    save(file, state)
    assert equal(load(file), state)


@given(state=states, data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_file_with_another_byte_anywhere_is_refused_or_means_the_same(
    file, state, data
):
    save(file, state)
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(
        st.integers(1, 255)
    )
    file.write_bytes(content)
    try:
        assert equal(load(file), state)
    except BadCheckpoint:
        pass


def test_foreign_and_missing_files_are_refused_by_name(file):
    safetensors.torch.save_file({"w": torch.ones(1)}, file)
    with pytest.raises(
        BadCheckpoint, match=r"state\.safetensors is not a Muster checkpoint"
    ):
        load(file)
    with pytest.raises(
        BadCheckpoint, match="nothing-here cannot be read: No such file"
    ):
        load(file.with_name("nothing-here"))
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        load(file.parent)


def test_other_programs_can_read_the_tensors(file):
    save(
        file,
        {
            "flag": torch.tensor([True]),
            "weights": torch.arange(3.0),
            "mean": np.arange(2),
        },
    )
    with safetensors.safe_open(str(file), "pt") as opened:
        found = [opened.get_tensor(name).tolist() for name in sorted(opened.keys())]
    assert found == [[True], [0.0, 1.0, 2.0], [0, 1]]
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begins = [8 + length + header[name]["data_offsets"][0] for name in "012"]
    assert [begin % size for begin, size in zip(begins, (1, 4, 8), strict=True)] == [
        0,
        0,
        0,
    ], "aligned, for mmap"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\[1\] is a builtins.object"),
        ({"a": {3.5: 1}}, r"state\['a'\] has the key 3.5"),
        ({(1, 2): 0}, "has the key"),
        ({"a": np.array([object()])}, "numpy.ndarray"),
        ({"a": {1, 2}}, "builtins.set"),
        ({"a": torch.eye(2).to_sparse()}, "Tensor"),
        ({"a": torch.nn.UninitializedParameter()}, "UninitializedParameter"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_place_and_the_old_file_stays(
    file, state, message
):
    save(file, "old")
    with pytest.raises(BadCheckpoint, match=message):
        save(file, state)
    assert load(file) == "old"


def test_a_state_that_holds_itself_is_refused(file):
    state: list[Any] = []
    state.append(state)
    with pytest.raises(BadCheckpoint, match="holds itself"):
        save(file, state)


def test_a_module_and_its_optimizer_come_back(file):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    save(
        file,
        {
            "net": net.state_dict(),
            "own": OrderedDict(net.named_parameters()),
            "adam": optimizer.state_dict(),
        },
    )
    state = load(file)
    assert equal(state["net"], dict(net.state_dict()))
    assert type(state["own"]["weight"]) is torch.Tensor
    assert not state["own"]["weight"].requires_grad
    fresh = torch.nn.Linear(2, 2)
    fresh.load_state_dict(state["net"])
    again = torch.optim.Adam(fresh.parameters())
    again.load_state_dict(state["adam"])
    for model, adam in ((net, optimizer), (fresh, again)):
        adam.zero_grad()
        model(torch.ones(2)).sum().backward()
        adam.step()
    assert torch.equal(net.weight, fresh.weight)


def test_transposed_and_conjugate_tensors_and_arrays_keep_their_values(file):
    matrix, numbers = torch.arange(6.0).reshape(2, 3), torch.tensor([1 + 2j])
    save(file, [matrix.T, matrix[:, ::2], numbers.conj(), np.arange(6).reshape(2, 3).T])
    transposed, strided, conjugate, array = load(file)
    assert transposed.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert strided.tolist() == [[0, 2], [3, 5]]
    assert conjugate.tolist() == [1 - 2j]
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_loaded_values_can_be_written_and_share_no_memory(file):
    same = torch.zeros(2)
    save(file, {"a": same, "b": same, "c": np.zeros(2)})
    state = load(file)
    state["a"] += 1
    state["c"] += 1
    assert state["b"].tolist() == [0, 0]


def sealed(rest: bytes) -> str:
    """A description with a right checksum: what an attacker can make."""
    return (b'{"crc32": "%08x",' % zlib.crc32(rest) + rest).decode("latin1")


@pytest.mark.parametrize(
    "what", [b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b'"\xff"', b"{"]
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_sealed_header_that_is_no_json_is_refused(file, what, inner):
    quoted = json.dumps(sealed(b'"x": ' + what)).encode()
    text = b'{"__metadata__": {"muster": ' + (quoted if inner else what) + b"}}"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BadCheckpoint, match="damaged"):
        load(file)


@pytest.mark.parametrize(
    "state",
    [
        *(
            {"bytes": 1},
            {"tensor": -2},
            {"tuple": 5},
            {"dict": [[[], 1]]},
            {},
            {"float": "1e"},
            {"int": "x"},
        ),
        *({"tensor": 0, "dtype": "complex128", "shape": [n]} for n in (10**18, -2)),
        {"tensor": 0, "dtype": "load", "shape": []},
        *({"array": 0, "dtype": "O"}, {"array": 0, "dtype": "i8", "shape": [10**18]}),
    ],
)
def test_a_sealed_header_that_lies_is_refused(file, state):
    about = {"format": 2, "state": state}
    crc = f"{zlib.crc32(b'torch.uint8 [0]'):08x}"
    text = sealed(json.dumps({"tensors": {"0": crc}, "about": about})[1:].encode())
    safetensors.torch.save_file(
        {"0": torch.empty(0, dtype=torch.uint8)}, file, {"muster": text}
    )
    with pytest.raises(
        BadCheckpoint,
        match="is damaged|or damaged: '1' is missing|or damaged: '-2' is missing",
    ):
        load(file)


def test_another_format_is_refused(file):
    text = sealed(
        json.dumps({"tensors": {}, "about": {"format": 99, "state": None}})[1:].encode()
    )
    safetensors.torch.save_file({}, file, {"muster": text})
    with pytest.raises(
        BadCheckpoint, match=r"^\S+ has format 99, and this version of Muster reads 2"
    ):
        load(file)


def test_a_dtype_that_is_never_written_is_refused(file):
    text = sealed(
        json.dumps(
            {
                "tensors": {"0": "00000000"},
                "about": {"format": 2, "state": {"tensor": 0}},
            }
        )[1:].encode()
    )
    entry = {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": {"muster": text}, "0": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BadCheckpoint, match="'0' is of dtype torch.float8_e8m0fnu"):
        load(file)
