"""What TorchRL's collectors with workers lack: errors of workers, the end of a collector, weights
in every form.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from signal import SIGTERM
from typing import Any, Literal

import torch
import torchrl.collectors
from tensordict import TensorDict
from torchrl.weight_update import MultiProcessWeightSyncScheme

from muster.compat.torchrl.progress import SharedProgress, pending_frames
from muster.compat.torchrl.weight_names import (
    by_name,
    fitted,
    is_tensordict,
    unsaved_buffers,
)
from muster.compat.torchrl.worker_errors import ErrorFolder, raise_original
from muster.errors import (
    BadOption,
    BadWeights,
    CollectorClosed,
    CollectorTimeout,
    MusterError,
)
from muster.utils.tracebacks import trimmed
from muster.weights.names import check_finite, copy_tensor, named_weights
from muster.workers.failures import Where, died

EXIT_S = 2.0  # time that a worker takes to exit after its connection was closed
# TorchRL's limit for the first weights
WEIGHTS_S = float(os.environ.get("TORCHRL_WEIGHT_SYNC_TIMEOUT", 120.0))
LOOK_S = 0.2  # interval of looks at workers while waiting for something else
_END = object()


class WorkerCalls(torchrl.collectors.MultiCollector):  # type: ignore[misc]
    """Base of the collectors with workers: every use of the workers is inside ``_workers()``.

    Attributes:
        procs: the processes of the workers. After the death of one, those of which the state is
            still known.
    """

    procs: list[Any]
    _is_made = False  # the constructor has ended
    _ended = False  # shutdown() was called
    _is_free = False  # start() was called: workers collect without requests
    _errors: ErrorFolder
    _progress: SharedProgress
    _found: MusterError | None = None  # the error of a worker

    # --- collecting -------------------------------------------------------------------------------

    def iterator(self) -> Iterator[Any]:
        """Yield batches as TorchRL; see ``iter(collector)``."""
        batches = super().iterator()
        while True:
            with self._workers():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def next(self) -> Any:
        """Return the next batch; None after the last."""
        self._check_open()
        return super().next()

    def start(self) -> None:
        """Let the workers fill the replay buffer, until ``shutdown``, which raises the error of a
        worker.
        """
        with self._workers():
            super().start()
        self._is_free = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Return a context in which the workers of a started collector do not collect."""
        with contextlib.ExitStack() as paused:
            with self._workers():
                paused.enter_context(super().pause())
            yield

    def stats(
        self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate"
    ) -> dict[str, Any]:
        """Return the numbers of this collector, with its progress in frames after the last batches
        of its workers, and the numbers of the workers on request; also after the end.
        """
        if workers == "aggregate":
            return {**super().stats(), **self._progress_of_all()}
        with self._workers():
            numbers = dict(super().stats(workers))
        return (
            numbers
            if workers == "per_worker"
            else {**numbers, **self._progress_of_all()}
        )

    def _progress_of_all(self) -> dict[str, int]:
        numbers = self._progress.total()
        # without a replay buffer, trajectories are assembled here
        numbers["pending_frames"] += pending_frames(
            getattr(self, "_traj_assembly", None)
        )
        return numbers

    def __len__(self) -> int:
        if self.total_frames == float("inf"):
            raise TypeError("an endless collector (total_frames=-1) has no length")
        return int(super().__len__())

    # --- weights ----------------------------------------------------------------------------------

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, **kwargs: Any
    ) -> None:
        """Send new weights to the workers.

        Args:
            policy_or_weights: a module, a TensorDict, or a dict of tensors: a state dict, or nested
                as a TensorDict is; of the policy, or of a module inside it. A dict of these by
                number of the worker, for schemes with ``per_worker_weights``. None: the policy that
                the collector was made with.
            worker_ids: numbers of the workers that get the weights. None: all.
            **kwargs: ``weights``, ``policy``, ``model_id``, ``weights_dict``, as in TorchRL.

        Raises:
            BadWeights: the weights do not fit, or are not finite. Nothing was changed.
            CollectorTimeout: a worker has not taken the weights in time. The collector was shut
                down.
        """
        with self._workers():
            if self._weight_sync_schemes:
                policy_or_weights, kwargs = self._checked(policy_or_weights, kwargs)
            super().update_policy_weights_(
                policy_or_weights, worker_ids=worker_ids, **kwargs
            )

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Use the weights that the registered schemes have received, or, without schemes, the given
        weights.

        Args:
            policy_or_weights: see ``update_policy_weights_``. They are copied into this collector's
                policy, and sent to the workers. None: send the policy's.
            weights: the same as a keyword.
            policy: the same as a keyword.

        Raises:
            ValueError: weights were given although schemes are registered, or twice.
            BadWeights: the weights do not fit, or are not finite. Nothing was changed.
        """
        sources = [
            source
            for source in (policy_or_weights, weights, policy)
            if source is not None
        ]
        if len(sources) > 1:
            raise ValueError(
                "the weights are given more than once: as the argument, as weights= or as policy="
            )
        given = sources[0] if sources else None
        with self._workers():
            if getattr(self, "_receiver_schemes", None):
                super().receive_weights(given)
                return
            if given is not None:
                model = self._model("policy", None)
                if model is None:
                    raise BadWeights(
                        "the policy of this collector is not a module, so it has no weights to"
                        " replace"
                    )
                own = named_weights(model) | unsaved_buffers(model)
                for name, tensor in fitted(given, model).items():
                    copy_tensor(own[name], tensor)
            if self._weight_sync_schemes:
                self.update_policy_weights_()

    def _checked(
        self, given: Any, named: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of ``update_policy_weights_`` with weights that fit.

        Raises:
            BadWeights: the weights do not fit, or are not finite.
        """
        model_id = named.get("model_id") or "policy"
        options = dict(named)
        if given is not None:
            given = self._fitted(given, model_id)
        for name in ("weights", "policy", "policy_weights"):
            if options.get(name) is not None:
                options[name] = self._fitted(options[name], model_id)
        if options.get("weights_dict") is not None:
            options["weights_dict"] = {
                name: self._fitted(own, name)
                for name, own in options["weights_dict"].items()
            }
        elif given is None and options.keys() <= {"model_id"}:
            model = self._model(model_id, None)
            if model is not None:
                check_finite(named_weights(model))
        return given, options

    def _fitted(self, given: Any, model_id: str) -> Any:
        """Return weights as TorchRL's schemes take them: a whole module, or a TensorDict of a whole
        module.
        """
        if model_id not in self._weight_sync_schemes:
            return given  # TorchRL raises KeyError
        if (
            type(given) is dict
            and given
            and all(isinstance(worker, int) for worker in given)
        ):
            if isinstance(
                self._weight_sync_schemes[model_id], MultiProcessWeightSyncScheme
            ):
                raise BadOption(
                    "weights were given by worker, and TorchRL's MultiProcessWeightSyncScheme sends"
                    " the same weights to all workers: use"
                    " SharedMemWeightSyncScheme(per_worker_weights=True)"
                )
            return {
                worker: self._fitted_to(own, self._model(model_id, worker))
                for worker, own in given.items()
            }
        whole = self._fitted_to(given, self._model(model_id, None))
        is_module = isinstance(given, torch.nn.Module) and not is_tensordict(given)
        # TorchRL takes more from a module than from its weights: its extra state.
        return (
            given
            if is_module and named_weights(given).keys() == whole.keys()
            else whole
        )

    def _fitted_to(self, given: Any, model: torch.nn.Module | None) -> TensorDict:
        if model is not None:
            return TensorDict(fitted(given, model)).unflatten_keys(".")
        named = by_name(given)
        check_finite(named)
        return TensorDict(named).unflatten_keys(".")

    def _model(self, model_id: str, worker: int | None) -> torch.nn.Module | None:
        """Return a model of this process with the names and shapes of a worker's; None if there is
        none.

        Args:
            worker: number of a worker, which may have a ``policy_factory`` of its own. None: any.
        """
        try:
            model = self.get_model(model_id)
        except (AttributeError, ValueError):
            model = None
        if (
            model is None
            and model_id == "policy"
            and self.policy_factory[worker or 0] is not None
        ):
            model = self.policy_factory[worker or 0]()
        return model if isinstance(model, torch.nn.Module) else None

    def _send_weights_scheme(
        self, *, model_id: str, scheme: Any, processed_weights: Any, worker_ids: Any
    ) -> None:
        with self._acknowledged(getattr(scheme, "_ack_queues", None) or {}):
            super()._send_weights_scheme(
                model_id=model_id,
                scheme=scheme,
                processed_weights=processed_weights,
                worker_ids=worker_ids,
            )

    @contextlib.contextmanager
    def _acknowledged(self, queues: Mapping[int, Any]) -> Iterator[None]:
        """Return a context in which one of TorchRL's schemes waits for workers to take weights,
        which has no limit.

        A thread ends the wait if a worker has exited, or after ``WEIGHTS_S``, with an
        acknowledgment in every queue: a worker that exits also ends the receiving threads of the
        others.

        Args:
            queues: the scheme's queues of acknowledgments, by worker.

        Raises:
            EOFError: a worker has exited.
            CollectorTimeout: a worker has not taken the weights in time. The collector was shut
                down.
        """
        if not queues:
            yield
            return
        done, exited, late = threading.Event(), threading.Event(), threading.Event()

        def watch() -> None:
            until = time.monotonic() + WEIGHTS_S
            while not done.wait(LOOK_S):
                if any(exit_code(process) is not None for process in self.procs):
                    exited.set()
                elif time.monotonic() > until:
                    late.set()
                else:
                    continue
                for queue in queues.values():
                    queue.put("updated")
                return

        watcher = threading.Thread(
            target=watch, name="muster-acknowledged", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
        if exited.is_set():
            raise EOFError("a worker has exited")
        if late.is_set():
            self.shutdown(raise_on_error=False)
            raise CollectorTimeout(
                f"not all workers have taken their weights within {WEIGHTS_S:g} s, so the collector"
                " was shut down. Standard error has the warnings of the weight sync scheme. If"
                " weights take longer, set the environment variable TORCHRL_WEIGHT_SYNC_TIMEOUT."
            )

    # --- workers ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _workers(self) -> Iterator[None]:
        """Return a context for calls to the workers.

        Raises:
            CollectorClosed: the collector was shut down.
            Exception: a worker has raised it; see ``raise_original``. The collector was shut down.
            WorkerDied: a worker has exited without an error. The collector was shut down.
        """
        self._check_open()
        with trimmed:
            try:
                yield
            except Exception as error:
                failure = None if self._ended else self._failure(error)
                if failure is None:
                    raise
                self.shutdown(raise_on_error=False)
                self.procs = [process for process in self.procs if is_known(process)]
                raise_original(failure)

    def _set_worker_attr(self, attr_name: str, value: Any) -> None:
        if not self._ended:  # afterwards TorchRL does nothing
            with self._workers():
                super()._set_worker_attr(attr_name, value)

    def _check_open(self) -> None:
        if self._ended:
            raise CollectorClosed("this collector was shut down; make a new one")

    def _end(self) -> MusterError | None:
        """Note the end of this collector.

        Return the error that a worker has raised since ``start()``.
        """
        if self._ended:
            return None
        # While it is made, TorchRL calls shutdown() after an error.
        failure = self._failure(None if self._is_made else sys.exc_info()[1])
        self._ended = True
        self._errors.close()
        # A worker exits with 0 after Ctrl-C.
        return (
            failure
            if self._is_free and getattr(failure, "exitcode", None) != 0
            else None
        )

    def _failure(self, error: BaseException | None) -> MusterError | None:
        """Return the error of the first worker that has raised one, or has exited; None if there is
        none.

        Args:
            error: what TorchRL has raised in this process.
        """
        if self._found is None and not self._ended:  # then workers exit on request
            self._found = self._look(error)
        return self._found

    def _look(self, error: BaseException | None) -> MusterError | None:
        processes = list(getattr(self, "procs", ()))
        if isinstance(error, (EOFError, OSError)) or isinstance(
            getattr(error, "__cause__", None), EOFError
        ):
            _join_ended([process for process in processes if is_known(process)])
        reported = self._errors.first()
        if reported is not None:
            pid, found = reported
            worker = next(
                (
                    n
                    for n, each in enumerate(processes)
                    if is_known(each) and each.pid == pid
                ),
                None,
            )
            if found.worker is None:
                found.worker = worker
            if worker is None or not self._is_made:
                return found
            processes[worker].join(EXIT_S)
            code = exit_code(processes[worker])
            if code is not None and (code >= 0 or code == -SIGTERM):
                return found  # else the worker has survived the error, which TorchRL has sent
        codes = {worker: exit_code(process) for worker, process in enumerate(processes)}
        dead = [worker for worker, code in codes.items() if code is not None]
        if not dead:
            return None
        # with which TorchRL ends the others
        first = min(dead, key=lambda worker: codes[worker] == -SIGTERM)
        where = Where(worker=first, pid=processes[first].pid)
        return died(where, phase="call", exitcode=codes[first])


def is_known(process: Any) -> bool:
    """Return whether a process can still be asked: TorchRL closes the objects of some after the
    death of another.
    """
    try:
        process.is_alive()
    except ValueError:
        return False
    return True


def exit_code(process: Any) -> int | None:
    """Return the exit code of a process; None if it runs, or is not known any more."""
    return process.exitcode if is_known(process) else None


def _join_ended(processes: Sequence[Any]) -> None:
    """Wait until a process has exited, of which one has closed its connection, and its exit code is
    known.
    """
    ended = connection.wait([process.sentinel for process in processes], timeout=EXIT_S)
    for process in processes:
        if process.sentinel in ended:
            process.join(
                EXIT_S
            )  # the kernel closes files before it tells the exit code


def _guarded(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torchrl.collectors.MultiCollector, name))
    def call(self: WorkerCalls, *args: Any, **kwargs: Any) -> Any:
        with self._workers():
            return getattr(super(WorkerCalls, self), name)(*args, **kwargs)

    return call


for _name in (
    *(
        "set_seed",
        "reset",
        "state_dict",
        "load_state_dict",
        "map_fn",
        "get_distant_attr",
    ),
    *("getattr_env", "getattr_policy", "enable_profile", "disable_profile"),
):
    setattr(WorkerCalls, _name, _guarded(_name))
