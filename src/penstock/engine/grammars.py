"""`Grammars`: the matchers of requests whose output must match a grammar, and the masks they give;
and what closes the reasoning of those with a thinking budget (`thinking.py`).

A gate holds a request until its grammar is compiled, a follower moves its matcher on with committed
tokens, and `late_inputs` asks all matchers of a step which tokens they allow, behind drafts, too,
while the device runs the forward. Knows no text and no device; how grammars are written is in
`text/grammars`.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib import import_module
from itertools import takewhile
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.core.followers import LateEntry
from penstock.engine.thinking import Thinking
from penstock.errors import RequestError
from penstock.types.model_spec import ModelSpec
from penstock.types.request import Request
from penstock.types.step import Int32s, LateInputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MAX_COMPILED = 256  # grammars kept, those used last
_MAX_COMPILED_CHARS = 1 << 24  # of their texts together
_COMPILE_TIMEOUT_S = 30.0
_COMPILE_THREADS = 2
_MAX_MASK_THREADS = 8
# Copies of a matcher share one lexer and its lock: one thread at a time makes a mask of theirs. So
# many rows have a lexer of their own, as far as there are threads.
_ROWS_PER_LEXER = 8
_MAX_RENEWALS = 2  # of a request's matcher
_MAX_RENEWAL_S = 0.05  # to compile it; every row of the step waits
_NOTHING = LateInputs()
_log = log.get(__name__)


def _library() -> Any:
    """Loaded with the first grammar: with tokenizers it takes a tenth of a second."""
    return import_module("penstock.engine.vocabulary")


class _Compiled(NamedTuple):
    """Copies of its matcher share one lexer, with all states that any of them has come to."""

    matcher: "LLMatcher"
    seconds: float


class _Lexer:
    """One grammar compiled, again when it is used up; for some of the grammar's requests."""

    def __init__(self, number: int, compiling: "Future[_Compiled]") -> None:
        self.number = number
        self.compiling = compiling
        self.num_users = 0


class _Running:
    """One request's matcher, at its last committed token."""

    def __init__(self, request: Request, lexer: _Lexer | None, eos_ids: Sequence[int]) -> None:
        self.grammar = "" if request.grammar is None else request.grammar.text
        self.lexer = lexer
        self.compiled = None if lexer is None else lexer.compiling.result()
        self.matcher = None if self.compiled is None else self.compiled.matcher.deep_copy()
        self.num_renewals = 0
        self.consumed: list[int] = []
        self.thinking = Thinking(request.thinking) if request.thinking is not None else None
        self.num_tokens = 0
        self._min_tokens = 0 if request.grammar is None else request.grammar.min_tokens
        self._stop_ids = request.stop_ids
        # The vocabulary knows all tokens that end an output of this model, a request some of them.
        self._foreign_ids = [one for one in eos_ids if one not in request.stop_ids]

    def consume(self, token_ids: Sequence[int]) -> None:
        assert self.matcher is not None
        self.consumed += token_ids
        self.matcher.consume_tokens(list(token_ids))

    def renew(self, compiled: _Compiled) -> None:
        self.num_renewals += 1
        self.compiled, self.matcher = compiled, compiled.matcher.deep_copy()
        self.matcher.consume_tokens(self.consumed)

    @property
    def error(self) -> str | None:
        if self.matcher is None or not self.matcher.is_error():
            return None
        return f"the grammar cannot go on: {self.matcher.get_error()}"

    def places(self, drafts: list[int]) -> "list[_Place]":
        """Where its next token stands, and behind each of the drafts that may be that token: behind
        one that may not, or behind the end of the output, nothing counts."""
        places = [_Place(self, self.num_tokens, self.thinking)]
        if self.error is not None:
            return places
        drafts = [*takewhile(self._goes_on, drafts)]
        if self.matcher is not None and drafts:
            drafts = drafts[: self.matcher.validate_tokens(drafts)]
        for draft in drafts:
            thinking = places[-1].thinking
            if thinking is not None:
                if not thinking.allows(draft):
                    break
                thinking = thinking.behind(draft)
            places.append(_Place(self, self.num_tokens + len(places), thinking))
        return places

    def _goes_on(self, draft: int) -> bool:
        return draft not in self._stop_ids and draft not in self._foreign_ids

    def fill_ends(self, num_tokens: int, words_W: Int32s) -> None:
        """What the matcher left out of its mask: which ends are allowed."""
        if self._foreign_ids:
            _clear(words_W, self._foreign_ids)
        if num_tokens < self._min_tokens:
            others_W = words_W.copy()
            _clear(others_W, self._stop_ids)
            if others_W.any():  # else nothing but the end is possible
                words_W[:] = others_W
        if self.error is not None:
            # Any token will do: with its commit the request fails, and says why. Without one the
            # row would look as if the model were broken.
            words_W[:] = -1


class _Place(NamedTuple):
    """Of one token to draw."""

    running: _Running
    num_tokens: int  # of the output before it
    thinking: Thinking | None

    @property
    def has_mask(self) -> bool:
        has_matcher = self.running.matcher is not None
        return has_matcher or (self.thinking is not None and self.thinking.has_mask)

    def fill(self, words_W: Int32s) -> None:
        """What the matcher, if there is one, left out of its mask."""
        if self.running.matcher is None:
            words_W[:] = -1
        else:
            self.running.fill_ends(self.num_tokens, words_W)
        if self.thinking is None:
            return
        if self.thinking.forced:
            words_W[:] = 0
            forced = self.thinking.forced[0]
            words_W.view(np.uint32)[forced // 32] = np.uint32(1 << forced % 32)
        elif self.thinking.banned is not None:
            _clear(words_W, (self.thinking.banned,))


class _Refused(NamedTuple):
    """In the place of a token that is known already: another one than the draft, which is not kept
    then."""

    draft: int

    def fill(self, words_W: Int32s) -> None:
        words_W[:] = -1
        _clear(words_W, (self.draft,))


class _Walk(NamedTuple):
    """The masks of a matcher's next token and behind each of these drafts."""

    running: _Running
    first: int
    drafts: list[int]

    @property
    def number(self) -> int:
        return 0 if self.running.lexer is None else self.running.lexer.number


def _clear(words_W: Int32s, token_ids: Sequence[int]) -> None:
    bits_W = words_W.view(np.uint32)
    for token_id in token_ids:
        if token_id // 32 < len(bits_W):
            bits_W[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Grammars:
    """The vocabulary is loaded once, in a thread, when the first grammar comes."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._spec = spec
        self._num_words = -(-spec.vocab_size // 32)
        self._clock = clock
        self._pool = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")
        self._loading = Lock()
        self._compiled: OrderedDict[str, list[_Lexer]] = OrderedDict()
        self._num_chars = 0
        # By request id: its grammar, wherever the others have pushed it, and until when it waits.
        self._waiting: dict[int, tuple[_Lexer, float]] = {}
        self._running: dict[int, _Running] = {}  # by request id, once its grammar is compiled

    @property
    def num_matchers(self) -> int:
        return len(self._running)

    # Gate

    def ready(self, request: Request) -> bool:
        if request.id in self._running:
            return True
        if request.grammar is None:
            if request.thinking is not None:
                self._running[request.id] = _Running(request, None, ())
            return True
        if request.id not in self._waiting:
            lexer = self._lexer(request.grammar.text)
            lexer.num_users += 1
            self._waiting[request.id] = lexer, self._clock() + _COMPILE_TIMEOUT_S
        lexer, deadline = self._waiting[request.id]
        if not lexer.compiling.done():
            if self._clock() > deadline:
                raise RequestError(
                    "invalid_value",
                    f"the grammar was not compiled within {_COMPILE_TIMEOUT_S:.0f} s; simplify it",
                )
            return False
        try:
            running = _Running(request, lexer, self._vocabulary.eos_tokens)
        except Exception as error:
            raise RequestError("invalid_value", f"the grammar cannot be used: {error}") from error
        del self._waiting[request.id]
        self._running[request.id] = running
        return True

    def _lexer(self, text: str) -> _Lexer:
        """The one that fewest use."""
        lexers = self._compiled.setdefault(text, [])
        self._compiled.move_to_end(text)
        found = min(lexers, key=lambda one: one.num_users, default=None)
        has_room = found is not None and found.num_users < _ROWS_PER_LEXER
        if found is None or (not has_room and len(lexers) < self._num_threads):
            found = _Lexer(len(lexers), self._pool.submit(self._make_matcher, text))
            lexers.append(found)
            self._num_chars += len(text)
            self._forget_oldest()
        return found

    def _forget_oldest(self) -> None:
        while len(self._compiled) > 1 and (
            len(self._compiled) > _MAX_COMPILED or self._num_chars > _MAX_COMPILED_CHARS
        ):
            text, lexers = self._compiled.popitem(last=False)
            self._num_chars -= len(text) * len(lexers)

    def _make_matcher(self, text: str) -> _Compiled:
        with self._loading:
            vocabulary = self._vocabulary
        started = time.monotonic()
        return _Compiled(
            _library().make_matcher(vocabulary, text), seconds=time.monotonic() - started
        )

    def _renew(self, running: _Running) -> bool:
        """The states of a lexer are bounded, and copies share them: one that uses them up breaks
        all others, and those that come later. So a matcher that breaks goes on with a new lexer,
        first with one that is shared again, then with one of its own; what is no fault of the lexer
        breaks again."""
        lexer, compiled = running.lexer, running.compiled
        assert lexer is not None and compiled is not None
        if running.num_renewals == _MAX_RENEWALS or compiled.seconds > _MAX_RENEWAL_S:
            return False
        is_first = running.num_renewals == 0
        if is_first and lexer.compiling.result() is not compiled:  # another one was here before
            compiled = lexer.compiling.result()
        else:
            compiled = self._make_matcher(running.grammar)
            if is_first:
                lexer.compiling = Future()
                lexer.compiling.set_result(compiled)
        running.renew(compiled)
        return running.error is None

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        started = self._clock()
        vocabulary = _library().load_vocabulary(self._config, self._spec)
        _log.info("vocabulary for grammars loaded in %.1f s", self._clock() - started)
        return vocabulary

    # Follower

    def on_commit(self, request: Request, token_ids: Sequence[int]) -> str | None:
        running = self._running.get(request.id)
        if running is None:
            return None
        running.num_tokens += len(token_ids)
        if running.thinking is not None:
            running.thinking.on_commit(token_ids)
        is_last = token_ids[-1] in request.stop_ids  # the end of the output is no part of it
        if running.matcher is not None and running.error is None:
            running.consume(token_ids[:-1] if is_last else token_ids)
            if running.error is not None:
                self._renew(running)
        return running.error

    def known_tokens(self, request: Request) -> Sequence[int]:
        """Where the grammar leaves one way for a while, the tokens of that way."""
        running = self._running.get(request.id)
        if running is None or running.matcher is None or running.error is not None:
            return ()
        if running.thinking is not None and running.thinking.has_mask:
            return ()
        known: list[int] = running.matcher.compute_ff_tokens()
        return known

    def on_close(self, request: Request) -> None:
        running, waiting = self._running.pop(request.id, None), self._waiting.pop(request.id, None)
        lexer = waiting[0] if waiting else running.lexer if running else None
        if lexer is not None:
            lexer.num_users -= 1

    # Late inputs

    def late_inputs(self, entries: Sequence[LateEntry]) -> LateInputs:
        """A mask for every row of logits that may count and is not free."""
        positions: list[int] = []
        places: list[_Place | _Refused] = []
        walks: list[_Walk] = []
        for entry in entries:
            # A request that has ended meanwhile has none, and its token is dropped.
            running = self._running.get(entry.request.id)
            if running is None:
                continue
            if entry.is_void:
                if entry.drafts:
                    positions.append(entry.position)
                    places.append(_Refused(entry.drafts[0]))
                continue
            ahead = running.places(entry.drafts)
            if running.matcher is not None and running.error is None:
                drafts = entry.drafts[: len(ahead) - 1]
                walks.append(_Walk(running, len(positions), drafts))
            for offset, place in enumerate(ahead):
                if place.has_mask:
                    positions.append(entry.position + offset)
                    places.append(place)
        if not positions:
            return _NOTHING
        masks_NW = np.zeros((len(places), self._num_words), np.int32)
        self._walk(walks, masks_NW)
        for one, mask_W in zip(places, masks_NW, strict=True):
            one.fill(mask_W)
        return LateInputs(positions=np.array(positions, np.int32), bitmasks=masks_NW)

    def _walk(self, walks: Sequence[_Walk], masks_NW: Int32s) -> None:
        """Drafts are walked by a copy: what breaks it has not happened yet."""
        start, num_bytes = masks_NW.ctypes.data, masks_NW.strides[0]
        matchers = [walk.running.matcher for walk in walks]
        walkers = [
            matcher.deep_copy() if walk.drafts else matcher
            for walk, matcher in zip(walks, matchers, strict=True)
            if matcher is not None
        ]
        if len(walks) < 2 or self._executor is None:
            for matcher, (_, first, drafts) in zip(walkers, walks, strict=True):
                matcher.unsafe_compute_mask_ptr(start + first * num_bytes, num_bytes)
                for number, draft in enumerate(drafts, first + 1):
                    matcher.try_consume_tokens([draft])
                    matcher.unsafe_compute_mask_ptr(start + number * num_bytes, num_bytes)
        else:
            # Threads take neighbors: those of one lexer would wait for each other.
            order = sorted(range(len(walks)), key=lambda at: walks[at].number)
            asked = [(walkers[at], walks[at].first, walks[at].drafts) for at in order]
            target = start, num_bytes, len(masks_NW)
            if single := [(matcher, first) for matcher, first, drafts in asked if not drafts]:
                self._executor.unsafe_compute_mask_ptr(single, *target)
            if drafted := [one for one in asked if one[-1]]:
                self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        for walker, (running, first, drafts) in zip(walkers, walks, strict=True):
            if not walker.is_error():
                continue
            place = start + first * num_bytes
            masks_NW[first + 1 : first + 1 + len(drafts)] = -1  # as `fill_ends` does
            assert running.matcher is not None
            if drafts:
                running.matcher.unsafe_compute_mask_ptr(place, num_bytes)
            if running.matcher.is_error() and self._renew(running):
                running.matcher.unsafe_compute_mask_ptr(place, num_bytes)

    @cached_property
    def _num_threads(self) -> int:
        return max(1, min(_MAX_MASK_THREADS, (os.cpu_count() or 1) // 2))

    @cached_property
    def _executor(self) -> "LLExecutor | None":
        return _library().make_executor(self._num_threads) if self._num_threads > 1 else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
