"""What bytes each token stands for, derived from the `decoder` part of a tokenizer.json.

Text is the concatenation of its tokens' bytes, so streaming, stop strings and per-token
log-probabilities need nothing else. Knows the two families language models use: byte-level BPE, and
sentencepiece-style decoders (`▁` for a blank, `<0xAB>` for a byte, one blank cut off at the start
of the text).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PieceRule:
    """`to_bytes` of a token's string; `first` then trims the first non-empty piece of a text."""

    to_bytes: Callable[[str], bytes]
    first: Callable[[bytes], bytes]


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule:
    """The rule of a tokenizer.json's decoder; `None` means tokens joined by blanks."""
    if decoder is None:
        return PieceRule(lambda token: b" " + token.encode(), _cut_one_blank)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replaced: list[tuple[str, str]] = []
    byte_fallback = fused = byte_level = False
    first = _unchanged
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteLevel"} if (
                step is steps[-1]
            ):  # alone, or as GGUF files are converted
                byte_level = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                first = _cut_one_blank if start else _unchanged
            case {"type": "Metaspace", "replacement": str(old)}:
                replaced.append((old, " "))
                first = _unchanged if step.get("prepend_scheme") == "never" else _cut_all_blanks
            case _:
                raise ConfigError(
                    f"the tokenizer's decoder step '{step['type']}' is not supported here (known: "
                    "ByteLevel at the end, Replace, ByteFallback, Fuse, Strip after Fuse, "
                    "Metaspace); set skip_tokenizer_init: true to work with token ids only"
                )

    def to_bytes(token: str) -> bytes:
        if byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        for old, new in replaced:
            token = token.replace(old, new)
        return _byte_level(token) if byte_level else token.encode()

    return PieceRule(to_bytes, first)


def _unchanged(piece: bytes) -> bytes:
    return piece


def _cut_one_blank(piece: bytes) -> bytes:
    return piece.removeprefix(b" ")


def _cut_all_blanks(piece: bytes) -> bytes:
    return piece.replace(b" ", b"")


def _fallback_byte(token: str) -> bytes | None:
    """`<0xAB>` is one byte; anything else is not."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte: printable Latin-1 is itself, the other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with letters outside the alphabet is text."""
    try:
        return bytes([_BYTE_OF[ord(letter)] for letter in token])
    except KeyError:
        return token.encode()
