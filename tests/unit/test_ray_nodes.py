"""The parts of Ray links and buffers that need no cluster."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from muster.cluster.link import LinkLost
from muster.errors import BadOption
from tests.fakes.ray_cluster import needs_ray

pytestmark = needs_ray


@pytest.fixture
def end_of():
    """An end of a link, by its deadline; closed in the end."""
    from muster.cluster.ray_actor import NodeEnd

    with contextlib.ExitStack() as stack:

        def make(deadline_s):
            made = NodeEnd(deadline_s)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def end(end_of):
    return end_of(100.0)


class TestNodeEnd:
    def test_restores_the_order(self, end):
        for number in (1, 2, 0):
            end.arrive(number, b"%d" % number, 0, None)
        assert [end.receive().message for _ in range(3)] == [b"0", b"1", b"2"]

    def test_what_was_sent_before_the_end_is_received_first(self, end):
        end.end(2)
        end.arrive(0, b"first", 0, None)
        assert end.receive().message == b"first"
        threading.Timer(0.1, end.arrive, (1, b"goodbye", 0, None)).start()
        assert end.receive().message == b"goodbye"
        with pytest.raises(LinkLost, match="main process closed"):
            end.receive()

    def test_silence_of_the_main_process_is_noticed(self, end_of):
        end = end_of(0.5)
        begin = time.monotonic()
        with pytest.raises(LinkLost, match=r"said nothing for 0.5 s"):
            end.receive()
        assert time.monotonic() - begin > 0.4

    def test_process_that_was_stopped_cannot_send_any_more(self, end_of):
        end = end_of(0.5)
        threading.Event().wait(0.6)  # as after SIGSTOP and SIGCONT
        with pytest.raises(LinkLost, match=r"said nothing for 0.5 s"):
            end.send(b"late")

    def test_a_sender_waits_for_the_main_process_to_take_messages(self, end):
        from muster.cluster.ray_actor import WAITING

        for _ in range(WAITING):
            end.send(b"x")
        threading.Timer(0.1, end.depart).start()
        end.send(b"y")
        assert end.depart() == ([(b"y", 0, None, 0)], "")

    def test_nobody_takes_messages(self, end_of):
        from muster.cluster.ray_actor import WAITING

        end = end_of(2.0)
        for number in range(WAITING):
            end.send(b"x")
            if number % 100 == 0:
                end.arrive(number // 100, b"beat", 0, None)  # it is there, on a busy machine, too
        with pytest.raises(LinkLost, match=r"not taken anything for 2 s"):
            end.send(b"y")

    def test_main_process_waits_while_nobody_reads(self, end):
        from muster.cluster.ray_actor import WAITING

        returned = threading.Event()

        def arrive():
            for number in range(WAITING + 1):
                end.arrive(number, b"", 1, np.zeros(1, np.uint8))
            returned.set()

        thread = threading.Thread(target=arrive, daemon=True)
        thread.start()
        assert not returned.wait(0.2)
        end.receive()
        assert not returned.wait(0.2)  # the next one is waiting now
        end.receive()
        assert returned.wait(60)
        thread.join()

    def test_says_why_it_was_closed_after_the_last_message(self, end):
        end.send(b"last")
        end.close("its agent has ended")
        assert end.depart() == ([(b"last", 0, None, 0)], "its agent has ended")
        assert end.arrive(0, b"too late", 0, None) == "its agent has ended"

    def test_expected_takes_exactly_what_is_expected(self):
        from muster.cluster.ray_actor import ExpectedBlocks

        expected, memory = ExpectedBlocks(), np.zeros(3, np.uint8)
        expected.expect(2, memory)
        assert expected.put(1, np.ones(3, np.uint8)) is None
        assert expected.put(2, np.ones(3, np.uint8)) is memory
        assert memory.tolist() == [1, 1, 1]
        assert expected.put(2, np.full(3, 2, np.uint8)) is None  # once
        expected.expect(3, memory)
        expected.close()
        assert expected.put(3, np.full(3, 2, np.uint8)) is None
        expected.expect(4, memory)
        assert expected.put(4, np.full(3, 2, np.uint8)) is None
        assert memory.tolist() == [1, 1, 1]


class TestRayRuntime:
    def test_ray_clients_are_refused(self):
        from muster.cluster.ray_runtime import Lease

        with pytest.raises(BadOption, match="Ray client"):
            Lease({"address": "ray://somewhere:10001"})

    @pytest.mark.parametrize("config", [None, {"address": "auto"}])
    def test_clients_of_the_environment_are_refused(self, config, monkeypatch):
        from muster.cluster.ray_runtime import Lease

        monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
        with pytest.raises(BadOption, match="RAY_ADDRESS is 'ray://somewhere:10001', a Ray client"):
            Lease(config)

    def test_reasons_are_one_line(self):
        from ray.exceptions import RayError

        from muster.cluster.ray_runtime import first_line

        died = RayError("The actor died.\n\tclass_name: X\n\tpid: 3\nIts worker died. Some common causes include: (1)")
        assert first_line(died) == "The actor died. Its worker died."
        failed = RayError('The actor died, \x1b[36mray\x1b[39m\n  File "x.py", line 3\nZeroDivisionError: by zero')
        assert first_line(failed) == "ZeroDivisionError: by zero."


class TestTravel:
    def travelled(self, thing, **options):
        from muster.cluster.ray_buffer import _pack, _unpack

        payload, arrays = _pack(thing)
        return _unpack(payload, arrays, **options), payload, arrays

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
    def test_tensors_are_as_they_were(self, dtype):
        tensor = torch.arange(60).reshape(3, 4, 5).to(dtype)
        for one in (tensor, tensor[:, ::2], tensor.mT, tensor[:0], tensor[1, 1, 1]):
            got, _, _ = self.travelled(one)
            assert got.dtype == dtype
            assert got.shape == one.shape
            assert torch.equal(got, one)

    def test_batches_keep_everything(self):
        batch = TensorDict(
            {"obs": torch.rand(4, 3), "next": {"reward": torch.rand(4, 1)}, "note": NonTensorData("x", batch_size=[4])},
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
        got, _, _ = self.travelled({"w": weights, "c": torch.ones(2, dtype=torch.complex64).conj()})
        assert got["w"].requires_grad
        assert torch.equal(got["c"], torch.ones(2, dtype=torch.complex64))


class TestBuffersForNodes:
    def test_others_are_refused(self):
        from muster.cluster.ray_buffer import RayBuffer, for_nodes

        with pytest.raises(BadOption, match="list, which nodes cannot write into"):
            for_nodes([])
        with pytest.raises(BadOption, match="got a int"):
            RayBuffer(3)
