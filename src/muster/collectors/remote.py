"""What a parent process or a debugger asks of a collector: its models, and attributes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.errors import BadOption
from muster.utils.attributes import resolve

if TYPE_CHECKING:
    from muster.collectors.options import CollectorOptions
    from muster.rollout.group import Group


class RemoteAccess:
    """Mixed into every collector. Methods, since a remote caller cannot read properties."""

    options: CollectorOptions
    policy: Any
    _groups: list[Group]

    @property
    def env(self) -> Any:
        """The environment object, or the list of them."""
        objects = [env for group in self._groups for env in group.env.objects()]
        return objects[0] if len(objects) == 1 else objects

    @property
    def worker_idx(self) -> int:
        """Number of this collector among its parent's.

        Raises:
            BadOption: (a ``RuntimeError`` too) it was not given.
        """
        if self.options.worker_idx is None:
            raise NoWorkerIndex("worker_idx was not set: pass worker_idx= when this collector is one of several")
        return self.options.worker_idx

    def get_model(self, model_id: str) -> Any:
        """A model by its id: "policy", a part of it ("policy.module[0]", "actor"), or of the environment ("env...").

        Raises:
            BadOption: there is no such model.
        """
        if model_id == "policy":
            return self.policy
        root = self if model_id.split(".")[0].split("[")[0] in ("policy", "env") else self.policy
        try:
            return resolve(root, model_id)
        except BadOption as error:
            raise BadOption(f"model_id={model_id!r} is not known here: {error}") from error

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment (a list with one for each, where there are several)."""
        self._raise_from_background()
        env = self.env
        return [getattr(one, attr) for one in env] if isinstance(env, list) else getattr(env, attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        self._raise_from_background()
        return getattr(self.policy, attr)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        self._raise_from_background()
        if self.options.replay_buffer is None:
            raise BadOption(f"getattr_rb({attr!r}): this collector has no replay buffer")
        return getattr(self.options.replay_buffer, attr)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what a path from this collector names, such as ``"policy.module[0].reset_parameters"``.

        Only attributes and subscripts with a literal are followed; nothing is evaluated.

        Raises:
            BadOption: it names nothing, or nothing that can be called.
        """
        self._raise_from_background()
        found = resolve(self, attr_path)
        if not callable(found):
            raise BadOption(f"cascade_execute({attr_path!r}): that is {type(found).__name__}, which cannot be called")
        return found(*args, **kwargs)

    def _raise_from_background(self) -> None:
        raise NotImplementedError


class NoWorkerIndex(BadOption, RuntimeError):
    """``worker_idx`` was asked for and never set."""
