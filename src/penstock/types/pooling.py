"""What a model is served for, and what a request may want of its last position beside tokens."""

from dataclasses import dataclass
from enum import StrEnum

MAX_POOLED_TOKENS = 64


class Task(StrEnum):
    """What a server's model does."""

    GENERATE = "generate"  # tokens
    EMBED = "embed"  # a vector for each text
    SCORE = "score"  # how well a document fits a query, by the logits of "yes" and "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The hidden state of a prompt's last token, after the final norm; or its logits of
    `token_ids`."""

    token_ids: tuple[int, ...] = ()
