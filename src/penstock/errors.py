"""The whole exception tree. A user's mistake is one of these; `assert` is for our own mistakes."""


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


class CapacityError(PenstockError):
    """No room for one more request now. Becomes HTTP 429 with Retry-After."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendError(PenstockError):
    """The device side failed: out of memory, a kernel that does not launch, a wrong checkpoint."""


class WorkerDied(BackendError):
    """An engine process or rank ended without being asked to. Becomes HTTP 503."""
