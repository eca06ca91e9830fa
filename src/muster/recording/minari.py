"""Export to Minari datasets, and Minari datasets as batches."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from muster.errors import BadOption, BadRecording
from muster.keys import (
    ACTION,
    DONE,
    INFO,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    dotted,
    nested,
    next_of,
)
from muster.memory.specs import Array
from muster.recording.episodes import Episode, Piece, Recorded
from muster.recording.export import (
    CompleteEpisodes,
    Export,
    array_of,
    column_of,
    observation_keys,
    seed_of,
)
from muster.utils.attributes import optional
from muster.utils.texts import counted

DATASET_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+", re.ASCII)

if TYPE_CHECKING:
    from tensordict import TensorDict


def write_minari(
    recording: Recorded,
    dataset_id: str,
    env: Any,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    keys: Sequence[Key | str] | None,
    metadata: Mapping[str, Any],
) -> Export:
    """See ``Recording.to_minari``."""
    with optional("an export", "minari", "minari"):
        import minari
        from minari.data_collector import EpisodeBuffer
        from minari.storage.datasets_root_dir import get_dataset_path
    observed = observation_keys(recording, keys)
    actions = [key for key in recording.keys if key[0] == "action"]
    infos = []
    for key in recording.keys:
        if key[0] == INFO and next_of(key) in recording.keys:
            infos.append(key)
    episodes = CompleteEpisodes(recording, with_last=True)

    def actions_of(data: TensorDict) -> Any:
        columns = {key: array_of(data, key) for key in actions}
        return _as_space(columns, ACTION, action_space)

    def buffer(data: TensorDict) -> Any:
        observations = {key: _with_last(data, key) for key in observed}
        return EpisodeBuffer(
            seed=seed_of(data),
            observations=_as_space(observations, OBSERVATION, observation_space),
            actions=actions_of(data),
            rewards=array_of(data, REWARD),
            terminations=array_of(data, next_of(TERMINATED)),
            truncations=array_of(data, next_of(TRUNCATED)),
            infos=nested({key[1:]: _with_last(data, key) for key in infos}) or None,
        )

    if env is None:
        recorded = recording.meta.get("env")
        if _can_be_told(recorded):
            env = recorded
    actions_in = action_space
    observations_in = observation_space
    if env is None:
        seen = [actions_of(data) for data in episodes]
        actions_in = action_space or _space_of(seen, is_action=True)
        first = buffer(episodes[0]).observations
        observations_in = observation_space or _space_of([first])
    if not DATASET_ID.fullmatch(dataset_id):
        raise BadOption(
            f"{dataset_id!r} is not an id of a Minari dataset: expected NAME-vN or NAMESPACE/NAME-vN,"
            " with letters, digits, _ and -, such as cartpole/ppo-v0."
        )
    path = get_dataset_path(dataset_id)
    if path.exists():
        raise BadOption(
            f"there is a Minari dataset {dataset_id!r}: give another id, or `minari delete` that"
            " one."
        )
    try:
        with warnings.catch_warnings():
            # each of the optional ``metadata``
            unset = "`.*` is set to None|env_spec is None"
            warnings.filterwarnings("ignore", unset, UserWarning)
            dataset = minari.create_dataset_from_buffers(
                dataset_id,
                (buffer(data) for data in episodes),
                env=env,
                observation_space=observations_in,
                action_space=actions_in,
                **{"jpeg_encoding": False, **metadata},
            )
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, (ValueError, TypeError, AssertionError)):
            remedy = ""
            if env is not None:
                remedy = " Without an environment, the dataset has spaces only: leave env out."
            raise BadOption(
                f"Minari refuses the dataset {dataset_id!r}: {error}{remedy}"
            ) from error
        raise
    return episodes.written(Path(dataset.storage.data_path).parent)


class MinariRecording:
    """A Minari dataset as batches: one per episode, ``[length]``, with the keys of Muster's
    batches.

    ``len()`` is the number of frames. Dict observations have a key each, tuples ``("observation",
    "0")`` and so on. ``collector/traj_ids`` are the dataset's episode ids.

    Attributes:
        dataset: the ``minari.MinariDataset``.
        directory: of the dataset.
        meta: its metadata, with ``env`` as in Muster's recordings if it is known.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.directory = Path(dataset.storage.data_path).parent
        env = getattr(dataset, "env_spec", None)
        self.meta: dict[str, Any] = dict(dataset.storage.metadata)
        if env is not None:
            self.meta["env"] = env.id

    def __len__(self) -> int:
        return int(self.dataset.total_steps)

    @property
    def batches(self) -> int:
        """The number of batches, which are episodes."""
        return int(self.dataset.total_episodes)

    def __iter__(self) -> Iterator[TensorDict]:
        for data in self.dataset.iterate_episodes():
            yield _batch(data)

    def batch(self, i: int) -> TensorDict:
        """Return the episode ``i``, ``[length]``."""
        if not -self.batches <= i < self.batches:
            raise IndexError(f"batch {i} of a dataset of {self.batches} episodes")
        return _batch(self.dataset[i])

    episode = batch

    @cached_property
    def episodes(self) -> tuple[Episode, ...]:
        """The table of episodes. Reads everything once."""
        found = []
        for number, data in enumerate(self.dataset.iterate_episodes()):
            terminated = bool(data.terminations[-1])
            truncated = bool(data.truncations[-1])
            episode = Episode(
                traj_id=int(data.id),
                env=0,
                length=len(data),
                episode_return=float(np.sum(data.rewards, dtype=np.float64)),
                terminated=terminated,
                truncated=truncated,
                complete=terminated or truncated,
                pieces=(Piece(number, 0, 0, len(data)),),
            )
            found.append(episode)
        return tuple(found)

    def __repr__(self) -> str:
        held = f"{counted(len(self), 'frame')} in {counted(self.batches, 'episode')}"
        return f"MinariRecording({str(self.directory)!r}: {held})"


def load_minari(
    source: str | os.PathLike[str], dataset_id: str | None
) -> MinariRecording:
    """Open the local dataset with an id; without one, the dataset in the directory ``source``.

    Raises ``BadRecording`` if there is none.
    """
    with optional("a Minari dataset", "minari", "minari"):
        import minari
    try:
        if dataset_id is not None:
            return MinariRecording(minari.load_dataset(dataset_id))
        return MinariRecording(minari.MinariDataset(Path(source, "data")))
    except (OSError, ValueError, KeyError) as error:
        raise BadRecording(
            f"Minari cannot open {str(source)!r}: {error}. `minari list local` shows the datasets"
            " of this machine; `minari download ID` fetches one."
        ) from error


def _batch(data: Any) -> TensorDict:
    from tensordict import TensorDict

    length = len(data)
    leaves: dict[Key, torch.Tensor] = {}
    for key, rows in _leaves(data.observations, OBSERVATION).items():
        leaves[key] = _tensor(rows[:-1])
        leaves[next_of(key)] = _tensor(rows[1:])
    for key, rows in _leaves(data.actions, ACTION).items():
        leaves[key] = _tensor(rows)
    for path, rows in _leaves(data.infos or {}, ()).items():
        has_last = isinstance(rows, np.ndarray) and len(rows) == length + 1
        if has_last and rows.dtype.kind in "biuf":
            key = (INFO, *path)
            leaves[key] = _tensor(rows[:-1])
            leaves[next_of(key)] = _tensor(rows[1:])
    terminated = torch.from_numpy(np.array(data.terminations, bool))[:, None]
    truncated = torch.from_numpy(np.array(data.truncations, bool))[:, None]
    ends = {TERMINATED: terminated, TRUNCATED: truncated, DONE: terminated | truncated}
    leaves |= {next_of(key): value for key, value in ends.items()}
    leaves |= {
        key: torch.zeros_like(terminated) for key in ends
    }  # no row begins after an end
    rewards = torch.from_numpy(np.array(data.rewards, np.float32))
    leaves[REWARD] = rewards[:, None]
    leaves[TRAJ_IDS] = torch.full((length,), int(data.id), device="cpu")
    return TensorDict(nested(leaves), batch_size=[length], names=["time"])


def _tensor(rows: Any) -> Any:
    if np.asarray(rows).dtype.kind in "US":
        from tensordict import NonTensorStack

        return NonTensorStack(*[str(row) for row in rows])
    try:
        return torch.from_numpy(np.array(rows))
    except TypeError as error:
        raise BadRecording(
            f"the dataset has {np.asarray(rows).dtype} values, which are not tensors"
        ) from error


def _leaves(value: Any, key: Key) -> dict[Key, Any]:
    """Return the leaves of nested dicts and tuples.

    A dict of observations has root keys; see ``MinariRecording``.
    """
    leaves: dict[Key, Any] = {}
    if isinstance(value, dict):
        above = () if key == OBSERVATION else key
        for name, each in value.items():
            leaves |= _leaves(each, (*above, name))
        return leaves
    if isinstance(value, tuple):
        for i, each in enumerate(value):
            leaves |= _leaves(each, (*key, str(i)))
        return leaves
    return {key: value}


def _with_last(data: TensorDict, key: Key) -> Any:
    """Return the column with the row after the last step, ``[length + 1, *shape]``."""
    rows = column_of(data, key)
    after = column_of(data, next_of(key))
    if isinstance(rows, list):
        return [*rows, after[-1]]
    return np.concatenate([rows, after[-1:]])


def _can_be_told(env: Any) -> bool:
    """Return whether Minari can store which environment it was: not, if it was registered with a
    class or a function.
    """
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    return spec is not None and isinstance(spec.entry_point, str)


def _as_space(
    columns: Mapping[Key, Array], root: Key, space: spaces.Space[Any] | None
) -> Any:
    """Nest columns as the space has them: an array, a dict, or a tuple. Without a space, names tell:
    one that is called as the root is an array, and 0, 1, ... are a tuple.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        at_top = isinstance(space, spaces.Dict) and root == OBSERVATION
        return _of_space(columns, () if at_top else root, space)
    value: Any = nested(columns)
    if set(value) == set(root):
        value = value[root[0]]
    return _tuples(value)


def _of_space(columns: Mapping[Key, Array], key: Key, space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return {name: _of_space(columns, (*key, name), part) for name, part in parts}
    if isinstance(space, spaces.Tuple):
        items = enumerate(space.spaces)
        return tuple(_of_space(columns, (*key, str(i)), part) for i, part in items)
    if key not in columns:
        raise BadOption(
            f"to_minari: a space that was given has {dotted(key)}, and the recording has"
            f" {sorted(map(dotted, columns))}"
        )
    return columns[key]


def _tuples(value: Any) -> Any:
    """Return nested dicts whose names are 0, 1, ... as tuples."""
    if not isinstance(value, dict):
        return value
    if set(value) == set(map(str, range(len(value)))):
        return tuple(_tuples(value[str(i)]) for i in range(len(value)))
    return {name: _tuples(each) for name, each in value.items()}


def _space_of(values: list[Any], *, is_action: bool = False) -> spaces.Space[Any]:
    """Return a space that has all rows of these arrays, dicts or tuples."""
    first = values[0]
    if isinstance(first, dict):
        parts: dict[str, spaces.Space[Any]] = {}
        for name in first:
            parts[name] = _space_of(
                [value[name] for value in values], is_action=is_action
            )
        return spaces.Dict(parts)
    if isinstance(first, tuple):
        items = []
        for i in range(len(first)):
            items.append(_space_of([value[i] for value in values], is_action=is_action))
        return spaces.Tuple(items)
    if isinstance(first, list):
        texts = [text for rows in values for text in rows]
        return spaces.Text(
            min_length=0,
            max_length=max(1, *map(len, texts)),
            charset=frozenset("".join(texts)) or frozenset(" "),
        )
    dtype = first.dtype
    shape = first.shape[1:]
    if is_action and dtype.kind in "iu" and not shape:
        lowest = min(0, *(int(rows.min()) for rows in values))
        highest = max(int(rows.max()) for rows in values)
        return spaces.Discrete(highest - lowest + 1, start=lowest)
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, np.int8)
    if dtype.kind not in "iu":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype.type)
