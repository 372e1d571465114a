"""Seeds of NATS users, each in a file of its own: by it a process proves who it is. The server knows the public half alone."""

import os
import secrets
from pathlib import Path

import nkeys

from shared.settings import SettingsError


def create(path: Path) -> None:
    """Write the seed of a new user, for the owner of the file only. Raises FileExistsError."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(seed + b"\n")


def public_key(path: Path) -> str:
    """Of the user whose seed is in a file. Raises SettingsError, which tells nothing of what is in it."""
    try:
        pair = nkeys.from_seed(bytearray(path.read_bytes().strip()))
        public = pair.public_key.decode()
    except OSError as error:
        raise SettingsError(f"the key of a NATS user, {path}: {error.strerror}") from None
    except (nkeys.NkeysError, ValueError, TypeError):
        public = ""
    if not public.startswith("U"):
        raise SettingsError(f"the key of a NATS user, {path}: there is no seed of a user in it")
    return public
