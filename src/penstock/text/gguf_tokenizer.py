"""Builds a tokenizer from the fields of a GGUF file.

GGUF keeps the vocabulary, the merges (or scores) and the kind of every token, but names the rule
that cuts text into words (`tokenizer.ggml.pre`) instead of writing it down; the rules are here.
Knows nothing of requests and templates; reading the container is `hub/gguf_file.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.errors import ConfigError
from penstock.hub.gguf_file import GgufFile

_WAY_OUT = "name a folder or model that has a tokenizer.json with --tokenizer"
_TEMPLATE = "tokenizer.chat_template"
_NAMED_TOKENS = {  # as a tokenizer folder calls it -> as GGUF does
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # spelt like this in the format
    "pad_token": "padding",
    "mask_token": "mask",
}
_EXTRA_EOS = ("eot", "eom")
_LLAMA_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where the file names none


class _Kind(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text becomes words: each pattern in turn cuts what the ones before it left."""

    patterns: tuple[str, ...]
    digits_apart: bool = False  # each digit is a word, before any pattern
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is that token
    add_bos: bool = False  # where the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (  # words end where a capital follows a small letter
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}|"
    r"{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _BLANKS
)
_UNCASED = (
    _SHORT_FORMS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    + _BLANKS
)

_DIGITS_THEN_GPT2 = _Cut((_GPT2,), digits_apart=True)
_LLAMA3 = _Cut((_UNCASED.format(number=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = _Cut((_UNCASED.format(number=r"\p{N}"),), nfc=True)
_GPT_4O = _Cut(
    (_CASED.format(ending=_SHORT_FORMS + "?", number=r"\p{N}{1,3}"),), ignore_merges=True
)
_CUTS = {
    "default": _Cut((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Cut((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT_4O,
    "tekken": _Cut((_CASED.format(ending="", number=r"\p{N}"),), ignore_merges=True, add_bos=True),
    "deepseek-coder": _Cut(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
    "deepseek-v3": _Cut(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
        )
    ),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    backend: Tokenizer
    special_tokens: dict[str, str]
    extra_eos_ids: tuple[int, ...]
    chat_templates: dict[str, str]


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    fields = _Fields(path, GgufFile(path).metadata)
    vocabulary = _Vocabulary(fields)
    match fields.text("model"):
        case "gpt2":
            backend, add_bos = _byte_level(fields, vocabulary)
        case "llama":
            backend, add_bos = _sentencepiece(fields, vocabulary), True
        case kind:
            fields.refuse(f"a tokenizer of the kind '{kind}'; known are gpt2 and llama")
    backend.add_special_tokens([_added(vocabulary.tokens[i]) for i in vocabulary.special_ids])
    backend.add_tokens([_added(token) for token in vocabulary.of_kind(_Kind.USER_DEFINED)])
    _add_ends(backend, fields, vocabulary, add_bos)
    return GgufTokenizer(
        backend,
        {
            name: vocabulary.tokens[vocabulary.named[field]]
            for name, field in _NAMED_TOKENS.items()
            if field in vocabulary.named
        },
        tuple(vocabulary.named[field] for field in _EXTRA_EOS if field in vocabulary.named),
        _chat_templates(fields.metadata),
    )


def save_gguf_tokenizer(path: Path, folder: Path) -> None:
    """The same as files of a folder: tokenizer.json, and tokenizer_config.json with the templates.

    Which further tokens end a text is the model's configuration's to say.
    """
    found = read_gguf_tokenizer(path)
    found.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    templates = found.chat_templates
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    text = json.dumps(config | found.special_tokens, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class _Fields:
    """The file's `tokenizer.ggml.*` fields, each checked for its type when it is asked for."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata

    def refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"{self.path} has {what}; {_WAY_OUT}")

    def text(self, name: str) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, str):
            self.refuse(f"no text in its field tokenizer.ggml.{name}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def has(self, name: str) -> bool:
        return f"tokenizer.ggml.{name}" in self.metadata

    def list_of(self, name: str, *types: type, length: int | None = None) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not all(isinstance(item, types) for item in value):
            self.refuse(f"no usable list in its field tokenizer.ggml.{name}")
        if length is not None and len(value) != length:
            self.refuse(f"{len(value)} entries in tokenizer.ggml.{name} for {length} tokens")
        return value

    def id_of(self, name: str, num_tokens: int) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < num_tokens:
            self.refuse(f"{name}_token_id {value} in a vocabulary of {num_tokens} tokens")
        return value


class _Vocabulary:
    """`tokens` by id, `kinds` beside them; `ids` leaves out the fillers that stand for nothing."""

    def __init__(self, fields: _Fields) -> None:
        self.tokens: list[str] = fields.list_of("tokens", str)
        size = len(self.tokens)
        self.kinds: Sequence[int] = (
            fields.list_of("token_type", int, length=size)
            if fields.has("token_type")
            else [_Kind.NORMAL] * size
        )
        defaults = _LLAMA_IDS if fields.text("model") == "llama" else {}
        self.named: dict[str, int] = {}
        for name in (*_NAMED_TOKENS.values(), *_EXTRA_EOS):
            token_id = fields.id_of(name, size)
            if token_id is None and defaults.get(name, size) < size:
                token_id = defaults[name]
            if token_id is not None:
                self.named[name] = token_id
        ends = {self.named[name] for name in ("bos", "eos", *_EXTRA_EOS) if name in self.named}
        self.special_ids = [
            i
            for i, kind in enumerate(self.kinds)
            if kind in (_Kind.UNKNOWN, _Kind.CONTROL) or i in ends
        ]
        self.ids = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _Kind.UNUSED or i in ends
        }

    def of_kind(self, wanted: _Kind) -> list[str]:
        pairs = zip(self.tokens, self.kinds, strict=True)
        return [token for token, kind in pairs if kind == wanted]


def _byte_level(fields: _Fields, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = fields.text("pre")
    cut = _CUTS.get(name)
    if cut is None:
        fields.refuse(f"the unknown pre-tokenizer '{name}'; known are {', '.join(_CUTS)}")
    # No token for the unknown: a byte the vocabulary lacks is left out.
    backend = _bpe(fields, vocabulary, _merges(fields), ignore_merges=cut.ignore_merges)
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in cut.patterns]
    if cut.digits_apart:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _sentencepiece(fields: _Fields, vocabulary: _Vocabulary) -> Tokenizer:
    has_merges = fields.has("merges")
    merges = _merges(fields) if has_merges else _merges_from_scores(fields, vocabulary)
    unknown = vocabulary.named.get("unknown")
    backend = _bpe(
        fields,
        vocabulary,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    blanks = normalizers.Replace(" ", "▁")
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        pieces.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        backend.normalizer = blanks
    backend.decoder = decoders.Sequence(pieces)
    return backend


def _bpe(
    fields: _Fields, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception for merges it cannot use
        raise ConfigError(
            f"{fields.path} has an unusable vocabulary ({error}); {_WAY_OUT}"
        ) from error


def _merges(fields: _Fields) -> list[tuple[str, str]]:
    merges = []
    for merge in fields.list_of("merges", str):
        at = merge.find(" ", 1)
        if at < 0:
            fields.refuse(f"the merge '{merge}', which names one token")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _merges_from_scores(fields: _Fields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece; the best scored piece is merged first."""
    scores = fields.list_of("scores", float, int, length=len(vocabulary.tokens))
    score_of = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
        if kind == _Kind.NORMAL
    }
    ranked = [
        (-score, -at, -len(token), token[:at], token[at:])
        for token, score in score_of.items()
        for at in range(1, len(token))
        if token[:at] in score_of and token[at:] in score_of
    ]
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_ends(backend: Tokenizer, fields: _Fields, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """Make the tokenizer put BOS and EOS around a text, where the file asks for it."""
    ends = {
        name: vocabulary.named[name]
        for name, default in (("bos", add_bos), ("eos", False))
        if name in vocabulary.named and fields.flag(f"add_{name}_token", default)
    }
    if not ends:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=["bos"] * ("bos" in ends) + ["$A"] + ["eos"] * ("eos" in ends),
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]}
            for name, token_id in ends.items()
        ],
    )


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template; the unnamed one is the default."""
    templates = {
        name.removeprefix(_TEMPLATE + "."): text
        for name, text in metadata.items()
        if name.startswith(_TEMPLATE + ".") and isinstance(text, str)
    }
    if isinstance(unnamed := metadata.get(_TEMPLATE), str):
        templates["default"] = unnamed
    return templates
