"""Methods that torch RPC can call with a reference (``RRef``) in place of the object, under
TorchRL's names.

::

    reference = rpc.RRef(collector)                       # in the process of the collector; sent to another one
    rpc.rpc_sync(reference.owner(), RPCCollector.next, args=(reference,))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import rpc

Class = TypeVar("Class", bound=type)
_REFERENCE: Any = getattr(rpc, "PyRRef", ())  # a PyTorch without RPC has none


def accept_remote_rref_invocation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method so that it can be called with a reference to an object of this process in
    place of it.
    """

    @functools.wraps(method)
    def invoked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _REFERENCE):
            # that of a subclass
            return getattr(self.local_value(), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return invoked


def accept_remote_rref_udf_invocation(decorated: Class) -> Class:
    """Class decorator that applies ``accept_remote_rref_invocation`` to all public methods,
    inherited ones included.

    Other processes find each method by the name of the decorated class.
    """
    for name in dir(decorated):
        method = inspect.getattr_static(decorated, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        invoked = accept_remote_rref_invocation(method)
        invoked.__module__, invoked.__qualname__ = (
            decorated.__module__,
            f"{decorated.__qualname__}.{name}",
        )
        setattr(decorated, name, invoked)
    return decorated
