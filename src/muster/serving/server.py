"""``muster.serve``: programs that connect, send observations and get actions; their steps arrive as
batches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from muster.collectors.multi import MultiCollector
from muster.collectors.multi_options import MultiOptions
from muster.collectors.schedules import FirstReadyKind, ScheduleKind
from muster.collectors.signatures import passes_on
from muster.errors import BadOption
from muster.serving.clients import Clients
from muster.utils.integers import integer
from muster.workers.first_ready import FirstReady
from muster.workers.options import check_timeouts
from muster.workers.requests import Request, Reset, Seed

CLIENT_TIMEOUTS: dict[str, float | None] = {"step": 60.0, "reset": None}
PASSED_ON = (
    *(
        "policy_factory",
        "trust_policy",
        "compile_policy",
        "frames_per_batch",
        "total_frames",
        "max_frames_per_traj",
    ),
    *(
        "set_truncated",
        "postproc",
        "split_trajs",
        "trajs_per_batch",
        "traj_format",
        "compact_obs",
        "obs_dtype",
    ),
    *(
        "replay_buffer",
        "replay_write_mode",
        "pre_collect_hook",
        "post_collect_hook",
        "on_step",
        "on_episode_done",
        "on_batch",
        "record",
    ),
    *(
        "track_policy_version",
        "update_at_each_batch",
        "device",
        "storing_device",
        "policy_device",
        "exploration_type",
    ),
    *(
        "seed",
        "layout",
        "validate",
        "execution",
        "num_threads",
        "prev_action_reward",
        "inference",
        "logger",
    ),
    *("progress", "watch", "slot_memory_limit"),
)


class PolicyServer(MultiCollector):
    """A collector whose environments are played by clients. Made by ``muster.serve``.

    Each batch has ``frames_per_batch`` steps of one client, whichever has made them first; a slow
    client does not delay others. Environments live in the clients: methods that reset, inspect or
    save environments raise ``BadOption``.
    """

    _is_set_up = False

    def __init__(self, clients: Clients, policy: Any, **options: Any) -> None:
        self._clients = clients
        factories = [
            partial(clients.make_env, number) for number in range(clients.count)
        ]
        super().__init__(factories, policy, backend="threads", **options)

    @property
    def address(self) -> str:
        """Where clients connect: ``host:port``."""
        return self._clients.address

    @property
    def connected(self) -> int:
        """Number of clients that are connected."""
        return self._clients.connected

    @property
    def lost(self) -> Counter[str]:
        """Number of clients whose connection has ended, by reason: "closed", "timeout",
        "bad_message", ...
        """
        return Counter(self._clients.lost)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Not available. Raises ``BadOption``."""
        raise self._refusal(
            "reset",
            "clients decide when an episode ends; max_frames_per_traj= limits it",
        )

    def set_seed(self, seed: int | Sequence[int], static_seed: bool = False) -> int:
        """Not available after construction. Raises ``BadOption``."""
        if self._is_set_up:
            raise self._refusal(
                "set_seed", "pass seed= to muster.serve; seeds of clients are their own"
            )
        return super().set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        """Not available. Raises ``BadOption``."""
        raise self._refusal(
            "state_dict",
            "the state of a client cannot be saved; save that of the policy",
        )

    def load_state_dict(
        self, state_dict: Any, *, trust: bool = False, strict: bool = True
    ) -> Any:
        """Not available. Raises ``BadOption``."""
        raise self._refusal(
            "load_state_dict",
            "the state of a client cannot be restored; load that of the policy",
        )

    def _ask(self, request: Request) -> Any:
        raise self._refusal(
            "this method", "environments are clients, which Muster cannot ask"
        )

    def _refusal(self, method: str, why: str) -> BadOption:
        return BadOption(f"{method} is not available for muster.serve: {why}.")

    def _schedule_kind(self) -> ScheduleKind:
        return FirstReadyKind()

    def _set_up(self) -> None:
        super()._set_up()
        # for servers that are dropped without shutdown()
        weakref.finalize(self, self._clients.close)
        source = self._engine.source
        assert isinstance(source, FirstReady)
        source.idle_groups = True
        # else each environment waits here, until all of them have a client
        with self._clients.without_clients():
            self._engine.weights.catch_up()
            source.lay_out_all("policy")
        source.pool.call(Reset({number: [0] for number in range(source.pool.num_envs)}))
        source.pool.call(
            Seed(self.options.seed, False)
        )  # the policy's first calls have drawn
        self._is_set_up = True

    def _end(
        self, timeout: float | None, *, close_env: bool, raise_on_error: bool
    ) -> None:
        self._clients.close()  # first, since environments wait for clients
        super()._end(timeout, close_env=close_env, raise_on_error=raise_on_error)


@passes_on(MultiOptions, names=PASSED_ON)
def serve(
    policy: Any = None,
    *,
    observation_space: Any,
    action_space: Any,
    address: str = "127.0.0.1:0",
    token: str | None = None,
    max_clients: int = 1,
    timeouts: Mapping[str, float | None] | None = None,
    **options: Any,
) -> PolicyServer:
    """Serve actions to programs that run their own loop (a game, a robot), and collect the steps
    that they make.

    ::

        with muster.serve(policy, observation_space=obs, action_space=act, frames_per_batch=256) as server:
            print(server.address)  # clients connect here; docs/serve.md has the protocol
            for batch in server:  # TensorDict [256], with the keys and counters of every collector
                ...

    A client plays one episode after another. If it is lost in an episode (its connection ends, it
    is too slow, or breaks the protocol), the episode is truncated: its last row has ``truncated``
    True, the last known observation as ``next/observation``, the reward 0, and
    ``collector/next_obs_valid`` False, since the result of its action is unknown. A client that
    connects afterwards plays in its place.

    Args:
        policy: see ``Collector``. None: uniformly random actions.
        observation_space, action_space: Gymnasium spaces of all clients, with parts of fixed
            shapes.
        address: ``host:port`` at which clients connect; port 0 is any free port. Nothing is
            encrypted.
        token: secret that clients send, of at least 16 characters beyond loopback. None: the
            environment variable ``MUSTER_SERVE_TOKEN``; on loopback, no token.
        max_clients: maximum number of clients at the same time. Another one is refused.
        timeouts: seconds that a client may take for a "step" (default 60), and between two episodes
            for a "reset" (None: no limit). Other phases are those of ``MultiAsyncCollector``.

    Returns:
        a collector, which listens until ``shutdown()``.

    Raises:
        BadOption: an option is wrong, the address is not available, or it needs a token.
        UnsupportedSpace: a part of a space has no fixed shape.
    """
    given = {} if timeouts is None else timeouts
    check_timeouts(given)
    if extra := sorted(options.keys() - set(PASSED_ON)):
        raise BadOption(
            f"muster.serve has no option {extra[0]!r}: environments are clients, and decide that"
            " themselves."
        )
    clients = Clients(
        observation_space,
        action_space,
        address=address,
        token=token,
        count=integer("max_clients", max_clients, 1),
        timeouts={
            phase: given.get(phase, seconds)
            for phase, seconds in CLIENT_TIMEOUTS.items()
        },
        check_bounds=options.get("validate") == "full",
    )
    try:
        waits = {
            **given,
            **dict.fromkeys(CLIENT_TIMEOUTS),
        }  # clients have deadlines of their own
        return PolicyServer(clients, policy, timeouts=waits, **options)
    except BaseException:
        clients.close()
        raise
