"""Loads a tokenizer from a local folder or GGUF file and turns text into ids and back.

Reads tokenizer.json and what lies beside it (GGUF: see `gguf`); knows no chat template syntax (see
`chat`) and nothing of requests that stream (see `detokenizer`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from penstock import log
from penstock.errors import ConfigError, RequestError, TokenizerError
from penstock.hub.files import has_file, read_json, read_text
from penstock.hub.gguf_file import is_gguf
from penstock.text.gguf_tokenizer import read_gguf_tokenizer
from penstock.text.pieces import piece_rule

# Real text has about four characters per token. Nothing that fits averages 64, so longer text is
# refused before it costs seconds of tokenizing.
MAX_CHARS_PER_TOKEN = 64

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FILE = "tokenizer.json"
_NUM_QUICK_IDS = 256  # to decode them takes less than a millisecond
_log = log.get(__name__)
T = TypeVar("T")


class Tokenizer:
    """One vocabulary. `special_tokens` are the named ones as text, `special_ids` all of them."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str],
        add_bos: bool = False,
        extra_eos_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.bos_id = self._named_id("bos_token")
        self.pad_id = self._named_id("pad_token")
        eos_id = self._named_id("eos_token")
        own_eos = () if eos_id is None else (eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*own_eos, *extra_eos_ids)))
        self._rule = piece_rule(_decoder_of(backend))
        self._pieces: dict[int, bytes] = {}
        # Some folders ask for a BOS only in tokenizer_config.json, with a post-processor that adds
        # none.
        self._prepend_bos = (
            add_bos
            and self.bos_id is not None
            and self.bos_id not in _calm(backend.encode, "a").ids
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer in a folder, or the one inside a .gguf file."""
        if is_gguf(folder):
            read = read_gguf_tokenizer(folder)
            return cls(
                read.backend,
                read.special_tokens,
                read.chat_templates,
                extra_eos_ids=read.extra_eos_ids,
            )
        path = folder / _FILE
        if not has_file(path):
            raise ConfigError(_missing(folder))
        try:
            backend = _calm(tokenizers.Tokenizer.from_file, str(path))
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = read_json(folder / "tokenizer_config.json", optional=True)
        named = read_json(folder / "special_tokens_map.json", optional=True)
        named |= _without_none(config)
        special_tokens = {
            name: content
            for name in _NAMED_TOKENS
            if (content := _content(named.get(name))) is not None
        }
        templates = _find_chat_templates(folder, config)
        return cls(backend, special_tokens, templates, add_bos=config.get("add_bos_token") is True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The batch lets other threads run meanwhile; without offsets it takes three quarters of the
        # time (200 tokens, 2026-11-16).
        try:
            [encoding] = _calm(
                self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens
            )
        except TypeError:
            check_characters(text, "prompt")
            raise
        ids: list[int] = encoding.ids
        if add_special_tokens and self._prepend_bos:
            assert self.bos_id is not None
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) <= _NUM_QUICK_IDS:
            return str(_calm(self._backend.decode, ids, skip_special_tokens=skip_special_tokens))
        # As above: this one lets other threads run.
        [text] = _calm(self._backend.decode_batch, [ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; empty for an id the vocabulary does not have."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = _calm(self._backend.id_to_token, token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._rule.to_bytes(token)
        return piece

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def trim_first(self, piece: bytes) -> bytes:
        """What a text's first piece keeps: sentencepiece-style decoders cut its leading blank."""
        return self._rule.first(piece)

    def _named_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self.id_of(content)


def check_characters(text: str, param: str) -> None:
    """Refuse what no file could hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_value",
            f"{param} holds half of a surrogate pair at character {error.start}, which is no "
            "character; send both halves",
            param,
        ) from None


def _calm(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """A call of the library. Its panics are no `Exception`s and would end more than a request."""
    try:
        return work(*args, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        _log.error("the tokenizer panicked: %s", panic)
        raise TokenizerError(
            f"the tokenizer broke down ({panic}); its files may be broken"
        ) from panic


def check_length(text: str, max_seq_len: int) -> None:
    """Refuse text that cannot fit, before tokenizing it."""
    max_chars = max_seq_len * MAX_CHARS_PER_TOKEN
    if len(text) > max_chars:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(text)} characters; {max_seq_len} tokens fit, and text over "
            f"{max_chars} characters is not tokenized; shorten the prompt or raise max_seq_len",
            "prompt",
        )


def _decoder_of(backend: tokenizers.Tokenizer) -> Any:
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _missing(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder} has a sentencepiece tokenizer.model but no {_FILE}; convert it once with "
            "transformers (AutoTokenizer.from_pretrained(folder).save_pretrained(folder)), or "
            "name a folder that has one with --tokenizer"
        )
    return (
        f"{folder} has no {_FILE}; name a folder or model that has one with --tokenizer, or set "
        "skip_tokenizer_init: true to work with token ids only"
    )


def _find_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template. A file of its own beats tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if has_file(jinja):
        return {"default": read_text(jinja)}
    beside = read_json(folder / "chat_template.json", optional=True)
    given = beside.get("chat_template", config.get("chat_template"))
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"chat_template in {folder} must be a string or a list of {{name, template}}"
        ) from error


def _without_none(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _content(token: Any) -> str | None:
    """A special token is written as text or as {"content": text, ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
