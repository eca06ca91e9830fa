"""The token: a secret that a main process and its nodes share, in a file or in the environment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from muster.errors import BadOption

TOKEN_BYTES = 32
SHORTEST_TOKEN = 16  # bytes
LONGEST_TOKEN = 4096
TOKEN_FILE = "MUSTER_TOKEN_FILE"
TOKEN = "MUSTER_TOKEN"


def read_token(given: bytes | str | os.PathLike[str] | None) -> bytes | None:
    """The secret, without white space around it.

    Args:
        given: bytes, or the path of a file. None: MUSTER_TOKEN_FILE or MUSTER_TOKEN of the
            environment.

    Returns:
        None if it is not given and not in the environment.

    Raises:
        BadOption: the file is missing or other users may read it, or the secret is too short or too
            long.
    """
    if given is None:
        if path := os.environ.get(TOKEN_FILE):
            given = path
        elif text := os.environ.get(TOKEN):
            given = text.encode()
        else:
            return None
    token = given.strip() if isinstance(given, bytes) else _read_secret(Path(given))
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
        raise BadOption(
            f"The token has {len(token)} bytes; {SHORTEST_TOKEN} to {LONGEST_TOKEN} are needed:"
            " `openssl rand -hex 32`."
        )
    return token


def write_token(path: Path, token: bytes) -> None:
    """Write a token into a new file that only this user can read."""
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
    ) as file:
        file.write(token)


def _read_secret(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # a pipe may have no end
            text = file.read(LONGEST_TOKEN + 1).strip() if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise BadOption(
            f"The token file {path} cannot be read: {error.strerror}. (A token itself is given as"
            " bytes.)"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadOption(
            f"The token file {path} has mode {stat.S_IMODE(mode):04o}, so that others may read it:"
            f" `chmod 600 {path}`."
        )
    return text
