"""`OutputGrammars`: the grammars of outputs, made in a thread and kept; the same schemas and tools
come again and again."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text.grammars.output_grammar import AnswerStart, output_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types.guided_decoding import GuidedDecodingParams
from penstock.types.request import ToolRule

_MAX_KEPT = 256  # those asked for last
_MAX_CHARS = 1 << 16  # of a grammar that is kept


class OutputGrammars:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[Any, ...], str] = OrderedDict()

    async def get(
        self,
        start: AnswerStart,
        guided: GuidedDecodingParams | None,
        tools: Sequence[Mapping[str, Any]],
        rule: ToolRule | None,
        several_calls: bool,
    ) -> str:
        """As `output_grammar`, which raises for what cannot be one."""
        key = start, guided, json.dumps(tools) if tools else "", rule, several_calls
        if key not in self._kept:
            text = await asyncio.to_thread(
                output_grammar, self._tokenizer, start, guided, tools, rule, several_calls
            )
            if len(text) > _MAX_CHARS:
                return text
            self._kept[key] = text
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
