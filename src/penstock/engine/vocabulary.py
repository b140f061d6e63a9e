"""What grammars need of the library and of the model's tokenizer, loaded with the first of them."""

import llguidance

from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.frontend.tokenizer_folder import tokenizer_folder
from penstock.text.grammars.library import limits_of, make_vocabulary
from penstock.text.harmony import end_ids
from penstock.text.tokenizer import Tokenizer
from penstock.types.model_spec import ModelSpec


def load_vocabulary(config: EngineConfig, spec: ModelSpec) -> llguidance.LLTokenizer:
    """From the tokenizer's files; the engine needs them for nothing else."""
    folder = tokenizer_folder(config)
    if folder is None:
        raise ConfigError("this engine runs without a tokenizer")
    tokenizer = Tokenizer.from_folder(folder)
    ends = {*spec.eos_token_ids, *tokenizer.eos_ids, *end_ids(tokenizer)}
    if not ends:
        raise ConfigError("this model names no token that ends an output")
    return make_vocabulary(tokenizer, spec.vocab_size, sorted(ends))


def make_matcher(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Compile a grammar; other threads run meanwhile."""
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits_of(grammar))
    tried = matcher.deep_copy()
    if not matcher.is_error():
        tried.compute_bitmask()  # one that is too wide for a mask is found out here
    if tried.is_error():
        raise ValueError(tried.get_error())
    return matcher


def make_executor(num_threads: int) -> llguidance.LLExecutor:
    """Threads that make the masks of several matchers at once."""
    return llguidance.LLExecutor(num_threads)
