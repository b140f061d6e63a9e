"""What a benchmark asks and what came back."""

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `num_input` is the length that was asked for; a server may count another."""

    prompt: str | tuple[int, ...]
    num_input: int
    max_tokens: int
    image_urls: tuple[str, ...] = ()
    model: str | None = None  # where it is not that of the whole benchmark


@dataclass(slots=True, kw_only=True)
class Response:
    """What became of one request. Times are seconds of one clock that all of them share."""

    started_at: float
    first_at: float = 0.0  # the first chunk
    last_at: float = 0.0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))  # between chunks
    text: str = ""
    num_output: int | None = None  # tokens, as the server counts them
    num_prompt: int | None = None
    num_cached: int | None = None  # of the prompt, found in the server's prefix cache
    token_ids: list[int] = field(default_factory=list)  # where the server sends them
    status: int = 0  # of HTTP; 0: none came
    tokens_per_step: float | None = None  # by speculation more than one
    error: str | None = None

    def note(self, now: float) -> None:
        """A chunk has arrived."""
        if self.first_at:
            self.gaps_s.append(now - self.last_at)
        else:
            self.first_at = now
        self.last_at = now

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.started_at

    @property
    def latency_s(self) -> float:
        return self.last_at - self.started_at

    @property
    def num_chunks(self) -> int:
        return len(self.gaps_s) + (self.first_at > 0)
