"""Prompts for filling in the middle (FIM): the text before and behind it, between special tokens.

Which ones is told by the vocabulary; all families have the same order: the text before the gap, the
text behind it, and then the model writes. Knows nothing of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.text.tokenizer import Tokenizer

# Tokens before the prefix, before the suffix, before the middle; and others at which it ends.
_SPELLINGS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (  # Qwen-Coder, CodeGemma
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    (  # StarCoder, Granite, Stable Code
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|endoftext|>"),
    ),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ()),  # DeepSeek-Coder, DeepSeek-V3
    ("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
)
_CODE_LLAMA = "▁<PRE>"
_NO_BLANK = "☺"  # as Meta's code has it: a text behind it begins without sentencepiece's blank


@dataclass(frozen=True, slots=True)
class FimTokens:
    prefix_id: int
    suffix_id: int
    middle_id: int
    stop_ids: tuple[int, ...]  # no middle goes on behind them
    suffix_lead: str = ""

    def prompt(
        self,
        tokenizer: Tokenizer,
        prefix: str | Sequence[int],
        suffix: str,
        add_special_tokens: bool,
    ) -> tuple[int, ...]:
        prefix_ids = _encode(tokenizer, prefix) if isinstance(prefix, str) else prefix
        begins = tokenizer.encode("")[:1] if add_special_tokens else []
        return (
            *(begins if begins == [tokenizer.bos_id] else ()),
            self.prefix_id,
            *prefix_ids,
            self.suffix_id,
            *self._suffix_ids(tokenizer, suffix),
            self.middle_id,
        )

    def _suffix_ids(self, tokenizer: Tokenizer, suffix: str) -> list[int]:
        lead = _encode(tokenizer, self.suffix_lead)
        ids = _encode(tokenizer, self.suffix_lead + suffix)
        return ids[len(lead) :] if ids[: len(lead)] == lead else _encode(tokenizer, suffix)


def find_fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """None: the model was not taught it."""
    for *places, ends in _SPELLINGS:
        ids = [tokenizer.id_of(str(token)) for token in places]
        if None in ids:
            continue
        stop_ids = [tokenizer.id_of(token) for token in ends]
        prefix_id, suffix_id, middle_id = known = [one for one in ids if one is not None]
        return FimTokens(
            *(prefix_id, suffix_id, middle_id),
            stop_ids=(*known, *(one for one in stop_ids if one is not None)),
            suffix_lead=_NO_BLANK if places[0] == _CODE_LLAMA else "",
        )
    return None


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
