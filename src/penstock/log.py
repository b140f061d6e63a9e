"""Logger set-up: one format, one prefix per process; reads the log-level variable."""

import logging
import os
import sys

_LEVELS = {
    "internal_error": logging.ERROR,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}


def setup(process: str, level: str | None = None) -> None:
    """Send every record of this process to stderr, prefixed with `process` ("http", "engine",
    "rank 1").
    """
    # Not in the format, so nobody need find them out for every record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    name = (level or os.environ.get("PENSTOCK_LOG_LEVEL", "info")).lower()
    least = _LEVELS.get(name, logging.INFO)
    # At info it has a line for each request it sends: of a batch, for each of its requests.
    logging.getLogger("httpx").setLevel(logging.WARNING if least == logging.INFO else least)
    logging.basicConfig(
        level=least,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname).1s [{process}] %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)
