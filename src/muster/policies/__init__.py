"""Policies: heads that sample fast, and adapters for everything else that chooses actions."""

from muster.policies.heads import Head, categorical, deterministic, gaussian, tanh_gaussian

__all__ = ["Head", "categorical", "deterministic", "gaussian", "tanh_gaussian"]
