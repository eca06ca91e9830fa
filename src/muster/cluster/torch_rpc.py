"""Nodes over torch RPC: they join as those of torch.distributed, and blocks of bytes travel as RPC's tensors.

RPC has no password: see ``rpc_agent``. The token keeps nodes of others out of the collector. It does not protect a
process whose RPC ports others can reach. So a node has such ports only if its own command line (or the launcher that
has started it) asks for RPC.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from muster.cluster.launchers import Launcher
from muster.cluster.link import Link, LinkLost
from muster.cluster.rendezvous import RPC, Membership, Rendezvous, hear, local_address, say
from muster.cluster.torch_distributed import DistributedCarrier
from muster.errors import BadOption
from muster.utils.private_names import VARIABLE, usable

if TYPE_CHECKING:
    from muster.cluster.rpc_agent import RpcAgent

MAIN_DEVICE = "cuda:0"  # where blocks of nodes with a visible device arrive


class RpcCarrier(DistributedCarrier):
    """Nodes over torch RPC. The collectors of a process share its RPC agent, which may be the user's.

    Args:
        count, launcher, rendezvous, deadline_s: see ``DistributedCarrier``.
        tensorpipe_options: for ``TensorPipeRpcBackendOptions``, here and in the nodes.
        visible_devices: for each node the CUDA device from which its blocks travel, to this process' first one (1,
            "cuda:1"); or None or "cpu": from the CPU to the CPU.

    Raises:
        BadOption: this PyTorch has no RPC, or an option has an impossible value.
    """

    name = "torch RPC"
    engine = RPC

    def __init__(
        self,
        count: int,
        *,
        launcher: Launcher,
        rendezvous: Rendezvous,
        deadline_s: float = 15.0,
        tensorpipe_options: Mapping[str, Any] | None = None,
        visible_devices: Sequence[int | str | torch.device | None] | None = None,
    ) -> None:
        check_rpc()
        from muster.cluster.rpc_agent import RpcAgent, Terms, check_options

        super().__init__(count, launcher=launcher, rendezvous=rendezvous, deadline_s=deadline_s)
        self._options = check_options(tensorpipe_options)
        self._devices = check_devices(visible_devices, count)
        self._agent: RpcAgent | None = RpcAgent.hold("muster-main", Terms(rendezvous.host, self._options))
        self._closing = threading.Lock()

    def meet(self, channel: Link, node: int, epoch: int) -> Link:
        """Tell the node where this process listens, and learn where it does."""
        from muster.cluster.rpc_link import RpcLink

        session, device = secrets.token_hex(16), self._devices[node]
        link = RpcLink(channel, session, self.deadline_s)
        try:
            if (agent := self._agent) is None:
                raise LinkLost("The collector is closed.")
            say(channel, url=agent.url, session=session, options=self._options, device=device)
            name = f"muster-node-{node}-{epoch}-{session}"
            link.begin(agent, agent.meet(name, hear(channel)["url"], () if device is None else (MAIN_DEVICE,)))
        except LinkLost as error:
            link.close()
            raise LinkLost(f"Node {node} has not joined: {error}") from error
        except BaseException:
            link.close()
            raise
        return link

    def close(self) -> None:
        super().close()
        with self._closing:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.release()


_node_agent: RpcAgent | None = None  # of this process, while it is a node: one for each session


def join_rpc(membership: Membership) -> Link:
    """The node's end of a session.

    Raises:
        LinkLost: the main process has given it up.
        BadOption: this PyTorch has no RPC, or RPC cannot listen at this machine's address.
    """
    global _node_agent
    channel, link = membership.channel, None
    try:
        check_rpc()
        from muster.cluster.rpc_agent import RpcAgent, Terms
        from muster.cluster.rpc_link import RpcLink

        card = hear(channel)
        session, device = card["session"], card["device"]
        main = f"muster-main-{session}"
        if _node_agent is not None:
            _node_agent.release()
            _node_agent = None
        devices = {} if device is None else {main: {device: MAIN_DEVICE}}
        terms = Terms(local_address(membership.host), card["options"], devices)
        _node_agent = RpcAgent.hold(f"muster-node-{membership.node}-{membership.epoch}", terms)
        link = RpcLink(channel, session, membership.deadline_s, device)
        link.begin(_node_agent, _node_agent.meet(main, card["url"]))
        say(channel, url=_node_agent.url)
    except BaseException:
        (link or channel).close()
        raise
    return link


def check_rpc() -> None:
    """Raise BadOption unless this PyTorch has RPC, with the private names that it is used by."""
    if not (dist.is_available() and dist.rpc.is_available()):
        raise BadOption(
            "RPCCollector: this PyTorch was built without torch.distributed.rpc. DistributedCollector does the same "
            "over torch.distributed, RayCollector over Ray."
        )
    from torch.distributed import autograd, rpc

    agent = ("_update_group_membership",)
    states = ("_init_rpc_states", "_finalize_shutdown")
    current = ("_get_current_rpc_agent", "_is_current_rpc_agent_set")
    owners = (getattr(rpc, "TensorPipeAgent", None), agent), (rpc.api, states), (rpc, current), (autograd, ("_init",))
    if not usable("torch", *owners):
        raise BadOption(
            f"RPCCollector: nodes can join and return only through private names of torch, which torch "
            f"{torch.__version__} does not have, or {VARIABLE}=never forbids. DistributedCollector does the same over "
            f"torch.distributed, RayCollector over Ray."
        )


def check_devices(devices: Sequence[int | str | torch.device | None] | None, count: int) -> list[str | None]:
    """The CUDA device of each node from which its blocks travel; None: they travel from the CPU.

    Raises:
        BadOption: there are not as many as nodes, one is none, or this process has no CUDA device to receive on.
    """
    if devices is None:
        return [None] * count
    if len(devices) != count:
        raise BadOption(f"visible_devices has {len(devices)} devices for {count} nodes: name one for each.")
    found: list[str | None] = []
    for device in devices:
        if device is None:
            found.append(None)
            continue
        try:
            one = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise BadOption(f"visible_devices has {device!r}, which is no device: {error}") from error
        if one.type not in ("cpu", "cuda"):
            raise BadOption(f"visible_devices has {device!r}; RPC takes 'cpu', 'cuda:0', ... or the number of a GPU.")
        found.append(None if one.type == "cpu" else f"cuda:{one.index or 0}")
    if any(found) and not torch.cuda.is_available():
        raise BadOption(
            f"visible_devices={devices!r}: this process has no CUDA device on which their data could arrive; "
            "leave visible_devices out."
        )
    return found
