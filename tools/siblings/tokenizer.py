"""Trains the siblings' one tokenizer and writes it as a Hugging Face folder.

Usage: tokenizer.py FOLDER [--format chatml|harmony] [--seed N]

A byte-level BPE over our own corpus; every digit is a token of its own. The tokens that delimit
turns are special (left out of plain text); think and tool marks are ordinary added tokens, so that
they stay in the text for parsers.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from chat_format import TEMPLATES, segments
from corpus import train_examples
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048

PAD = "<|endoftext|>"
TURN_TOKENS = (
    PAD,
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
)
MARK_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
STOP_TOKENS = {"chatml": ("<|im_end|>",), "harmony": ("<|return|>", "<|call|>")}

# a contraction; one digit; a word; a run of signs; white space
_PIECES = r"'(?:s|t|m|d|re|ve|ll)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(seed: int, num_examples: int = 20_000) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens learned from the training split in both formats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*TURN_TOKENS, *MARK_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_examples), trainer)
    described = json.loads(tokenizer.to_str())  # the trainer makes every added token special
    for token in described["added_tokens"]:
        token["special"] = token["content"] in TURN_TOKENS
    return Tokenizer.from_str(json.dumps(described))


def _texts(seed: int, num_examples: int) -> Iterator[str]:
    for i, example in enumerate(train_examples(seed, num_examples)):
        yield "".join(part.text for part in segments(("chatml", "harmony")[i % 2], example))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no '{token}'; write it again with tokenizer.py")
    return found


def write_tokenizer(tokenizer: Tokenizer, folder: Path, format: str) -> None:
    """tokenizer.json, tokenizer_config.json with the chat template, and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = STOP_TOKENS[format]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": stops[0],
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[format],
    }
    stop_ids = [token_id(tokenizer, token) for token in stops]
    generation = {
        "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
        "pad_token_id": token_id(tokenizer, PAD),
        "do_sample": False,
        "temperature": 0.0,
    }
    for name, content in (("tokenizer_config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=tuple(TEMPLATES), default="chatml")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.seed)
    write_tokenizer(tokenizer, args.folder, args.format)
    print(f"{tokenizer.get_vocab_size()} tokens written to {args.folder}")


if __name__ == "__main__":
    main()
