"""Two tiny vocabularies of the two decoder families, written as tokenizer folders."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SHARED = Path(__file__).parents[4] / "shared" / "tokenizers"
REAL = ("deepseek-v3", "gpt-oss", "llama-3", "qwen2.5", "qwen3")  # folders of SHARED
TINY = ("byte_level", "sentencepiece_style", "metaspace", "converted_from_gguf")  # functions below
SPECIALS = ("<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> Tokenizer:
    """256 bytes and a few merges; <s>, </s>, <pad> are special, <tool> is added but not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    vocab = {token: i for i, token in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_specials(tokenizer)
    return tokenizer


def sentencepiece_style() -> Tokenizer:
    """▁ for blanks, one token per letter, byte tokens for the rest, one blank cut at the start."""
    vocab = {"<unk>": 0, "▁": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for letter in "abcdefghijklmnopqrstuvwxyz.,!":
        vocab[letter] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    _add_specials(tokenizer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece_style()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def converted_from_gguf() -> Tokenizer:
    """Byte-level, with the decoder that transformers gives the tokenizer of such a file."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("▁", " "),
            decoders.ByteLevel(),
        ]
    )
    return tokenizer


def _add_specials(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", bos)]
    )


def write_folder(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return folder
