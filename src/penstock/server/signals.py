"""The signals that end a server. Light: taken before anything else is imported."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def take_signals(handle: Callable[[int, FrameType | None], object]) -> dict[signal.Signals, Any]:
    """Have them call `handle`; who had them before. `nohup` keeps SIGHUP from us."""
    return {
        number: signal.signal(number, handle)
        for number in _NUMBERS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
