"""`SamplingParams`: how one request wants its tokens chosen. Checks itself, knows no tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import RequestError
from penstock.types.guided_decoding import GuidedDecodingParams

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_SAMPLES = 128
MAX_LOGIT_BIAS = 1024  # tokens; every device row has room for as many as the widest request brought
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
MAX_LOGITS_PROCESSORS = 8
LOGITS_PROCESSORS = "penstock.logits_processors"  # group of entry points
_GREEDY_EPS = 1e-5
BOUNDS: Mapping[str, tuple[float, float | None]] = {  # of single fields, both included
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, None),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-2, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_SAMPLES),
    "length_penalty": (-10.0, 10.0),
    "thinking_token_budget": (0, None),
}
_MAPPINGS = ("logit_bias", "logits_processors")
_NOT_WITH_BEAMS = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "logit_bias", "stop", "prompt_logprobs", "guided_decoding", "bad_words"),
    *("bad_words_token_ids", "allowed_token_ids", "logits_processors", "thinking_token_budget"),
    "logprob_token_ids",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Defaults sample from the model's own distribution; `temperature=0` is greedy."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else may be drawn
    bad_words: tuple[str, ...] = ()  # never written; become ids outside the engine
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    # by the name of an entry point that the setting of this name lists: its arguments
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # whose log-probabilities are reported instead of those of the best `logprobs`
    logprob_token_ids: tuple[int, ...] = ()
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False  # of `best_of` beams, else `n`; the best `n` are returned
    length_penalty: float = 1.0  # a beam's log-probability is divided by length ** this
    early_stopping: bool | Literal["never"] = False  # when nothing better is looked for
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    guided_decoding: GuidedDecodingParams | None = None  # stays outside the engine
    thinking_token_budget: int | None = None  # after so many tokens reasoning is closed

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name in ("stop_token_ids", "bad_words", "bad_words_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logprob_token_ids", tuple(dict.fromkeys(self.logprob_token_ids)))
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        _within("logprob_token_ids", len(self.logprob_token_ids), 0, MAX_LOGPROB_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            _within("allowed_token_ids", len(self.allowed_token_ids), 1, MAX_ALLOWED_TOKEN_IDS)
        num_words = len(self.bad_words) + len(self.bad_words_token_ids)
        _within("bad_words", num_words, 0, 3 * MAX_BAD_WORDS)
        for word in self.bad_words_token_ids:
            _within("bad_words", len(word), 1, MAX_BAD_WORD_TOKENS)
        _within("logits_processors", len(self.logits_processors), 0, MAX_LOGITS_PROCESSORS)
        _within("max_tokens", self.max_tokens, 1, None)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, (low, high) in BOUNDS.items():
            _within(name, getattr(self, name), low, high)
        _within("best_of", self.best_of, self.n, MAX_SAMPLES)
        _within("stop", len(self.stop), 0, MAX_STOP_STRINGS)
        _within("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        _within("stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        if any(not text for text in self.stop):
            raise RequestError("invalid_value", "stop: an empty string never ends anything", "stop")
        for token_id, bias in self.logit_bias.items():
            _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

        if self.use_beam_search:
            self._check_beams()

    def _check_beams(self) -> None:
        """Beams go by the model's own log-probabilities, and end by ids."""
        if self.temperature not in (0.0, 1.0):
            what = f"temperature is {self.temperature}"
            raise RequestError("unsupported", f"{what}, beam search has none", "temperature")
        for name in _NOT_WITH_BEAMS:
            default = {} if name in _MAPPINGS else type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise RequestError(
                    "unsupported", f"{name} does not work with use_beam_search", name
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_EPS or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def num_samples(self) -> int:
        """How many sequences run; the best `n` of them are returned."""
        return self.best_of or self.n


def _within(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    is_number = isinstance(value, int) or math.isfinite(value)
    if not is_number or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError("invalid_value", f"{name} is {value}, it must be {bounds}", name)
