"""`Drain`: whether an API server is leaving, for all who must know. `http_server` tells it."""


class Drain:
    """Whether the API server is leaving, and whether at once. Neither is ever taken back."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_urgent = False

    def begin(self) -> None:
        self.is_begun = True

    def hurry(self) -> None:
        self.is_begun = self.is_urgent = True
