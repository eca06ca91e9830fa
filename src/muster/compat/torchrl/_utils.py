"""Names of ``torchrl._utils``."""

from muster.collectors.references import (
    accept_remote_rref_invocation,
    accept_remote_rref_udf_invocation,
)

__all__ = ["accept_remote_rref_invocation", "accept_remote_rref_udf_invocation"]
