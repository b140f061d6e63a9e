"""Where the sockets of one server lie, and what they are called. Needs no library of sockets."""

import itertools
import os
import tempfile

_serial = itertools.count()


def private_folder() -> str:
    """A new folder for sockets that only this user may enter."""
    return tempfile.mkdtemp(prefix="penstock-")


def address(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}-{os.getpid()}-{next(_serial)}"


def folder_of(ipc_address: str) -> str:
    return os.path.dirname(ipc_address.removeprefix("ipc://"))
