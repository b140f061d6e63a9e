"""The whole exception tree. A user's mistake is one of these; `assert` is for our own mistakes."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a mistyped name, or nothing where no known one is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


class PenstockError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(PenstockError):
    """A flag, YAML field, environment or checkpoint that cannot be used as given."""


class RequestError(PenstockError):
    """One request is wrong; the server stays as it is. Becomes HTTP 400."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class TokenizerError(PenstockError):
    """The tokenizer broke down on one text; its files may be broken. Becomes HTTP 500."""


class CapacityError(PenstockError):
    """No room for one more request now. Becomes HTTP 429 with Retry-After."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendError(PenstockError):
    """The device side failed: out of memory, a kernel that does not launch, a wrong checkpoint."""


class WorkerDied(BackendError):
    """An engine process or rank ended without being asked to. Becomes HTTP 503."""
