"""The parts of Ray links and buffers that need no cluster."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from muster.errors import BadOption
from tests.fakes.ray_cluster import needs_ray

pytestmark = needs_ray


class TestRayRuntime:
    @pytest.mark.parametrize("config", [None, {"address": "auto"}])
    def test_clients_of_the_environment_are_refused(self, config, monkeypatch):
        from muster.cluster.ray_runtime import Lease

        monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
        with pytest.raises(
            BadOption, match="RAY_ADDRESS is 'ray://somewhere:10001', a Ray client"
        ):
            Lease(config)

    def test_reasons_are_one_line(self):
        from ray.exceptions import RayError

        from muster.cluster.ray_runtime import first_line

        died = RayError(
            "The actor died.\n\tclass_name: X\n\tpid: 3\nIts worker died. Some common causes include: (1)"
        )
        assert first_line(died) == "The actor died. Its worker died."
        failed = RayError(
            'The actor died, \x1b[36mray\x1b[39m\n  File "x.py", line 3\nZeroDivisionError: by zero'
        )
        assert first_line(failed) == "ZeroDivisionError: by zero."


class TestTravel:
    def travelled(self, thing, **options):
        from muster.cluster.ray_buffer import _pack, _unpack

        payload, arrays = _pack(thing)
        return _unpack(payload, arrays, **options), payload, arrays

    @pytest.mark.parametrize(
        "dtype",
        [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64],
    )
    def test_tensors_are_as_they_were(self, dtype):
        tensor = torch.arange(60).reshape(3, 4, 5).to(dtype)
        for one in (tensor, tensor[:, ::2], tensor.mT, tensor[:0], tensor[1, 1, 1]):
            got, _, _ = self.travelled(one)
            assert got.dtype == dtype
            assert got.shape == one.shape
            assert torch.equal(got, one)

    def test_batches_keep_everything(self):
        batch = TensorDict(
            {
                "obs": torch.rand(4, 3),
                "next": {"reward": torch.rand(4, 1)},
                "note": NonTensorData("x", batch_size=[4]),
            },
            batch_size=[4],
            names=["time"],
        )
        got, payload, _ = self.travelled(batch)
        assert (got == batch).all()
        assert got.batch_size == batch.batch_size
        assert got.names == ["time"]
        assert got["note"] == "x"
        assert len(payload) < 5000

    def test_large_tensors_are_not_copied_into_the_pickle(self):
        tensor = torch.zeros(100_000)
        _, payload, arrays = self.travelled(tensor)
        assert len(payload) < 1000
        assert np.shares_memory(arrays[0], tensor.numpy())

    def test_what_comes_back_is_the_callers_own(self):
        tensor = torch.zeros(1000)
        assert self.travelled(tensor)[0].add_(1).sum() == 1000
        assert tensor.sum() == 0

    def test_the_buffer_sees_the_memory_itself(self):
        tensor = torch.zeros(1000)
        seen = self.travelled(tensor, copy=False)[0]
        tensor[3] = 5
        assert seen[3] == 5

    def test_special_tensors_travel_too(self):
        weights = torch.ones(3, requires_grad=True)
        got, _, _ = self.travelled(
            {"w": weights, "c": torch.ones(2, dtype=torch.complex64).conj()}
        )
        assert got["w"].requires_grad
        assert torch.equal(got["c"], torch.ones(2, dtype=torch.complex64))


class TestBuffersForNodes:
    def test_others_are_refused(self):
        from muster.cluster.ray_buffer import RayBuffer, for_nodes

        with pytest.raises(BadOption, match="list, which nodes cannot write into"):
            for_nodes([])
        with pytest.raises(BadOption, match="got a int"):
            RayBuffer(3)
