"""Every error Muster raises on purpose. One class per kind of remedy.

A message says who, what came, what was expected, and what to do. Errors that replace another
exception carry it as ``__cause__``.
"""

from __future__ import annotations


class MusterError(Exception):
    """Base class of all errors below."""


class BadOption(MusterError, ValueError):
    """An option has an impossible value, or contradicts another one."""


class UnknownOption(BadOption, TypeError):
    """A keyword that no collector knows; the message names the nearest known one."""


class UnsupportedSpace(MusterError, TypeError):
    """A Gymnasium space that cannot be stored as it is."""


class UnsupportedEnv(MusterError, TypeError):
    """An environment object that no adapter takes, or that breaks its own protocol."""


class EnvError(MusterError, RuntimeError):
    """An environment raised; the original is ``__cause__``."""


class BadEnvOutput(MusterError, ValueError):
    """An environment returned something that its spaces do not allow."""


class PolicyError(MusterError, RuntimeError):
    """A policy raised; the original is ``__cause__``."""


class BadPolicyOutput(MusterError, ValueError):
    """A policy returned something the environment or the batch cannot take."""


class BadWeights(MusterError, ValueError):
    """Published weights do not fit the policy, or are not finite. Nothing was changed."""


class CollectorClosed(MusterError, RuntimeError):
    """The collector was shut down."""


class CollectorBusy(MusterError, RuntimeError):
    """A second iterator was asked for while the first is still in use."""


class CollectorTimeout(MusterError, TimeoutError):
    """Something did not end within the time it was given."""


class SlotsExhausted(MusterError, MemoryError):
    """Too many batches are still referenced for another one to fit in the memory limit."""


class BadRecording(MusterError, ValueError):
    """A recording directory is missing, damaged, or of another format."""


class BadCheckpoint(MusterError, ValueError):
    """A checkpoint is missing, damaged, of something else, or of another format; or a state that none can hold."""


class ImportRefused(MusterError, PermissionError):
    """An env id or a file would run foreign code, which the command line does not do unasked."""
