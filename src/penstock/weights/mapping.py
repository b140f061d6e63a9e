"""Checkpoint names -> parameter names, as tables of rules. Knows names only, no tensors."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: `part` counts within the tensors fused into one parameter."""

    parameter: str
    part: int = 0


@dataclass(frozen=True, slots=True)
class Rename:
    old: str
    new: str
    is_usual: bool = True


@dataclass(frozen=True, slots=True)
class Fuse:
    into: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    under: str
    into: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unstack:
    under: str
    name: str
    parts: tuple[str, ...]
    is_transposed: bool = False
    takes_turns: bool = True
    is_usual: bool = True

    def member(self, name: str, number: int, part: int) -> str:
        """The name that a part of one number would have in a file of its own."""
        words = f"{self.under}.{self.name}"
        return _replace(name, words, f"{self.under}.{number}.{self.parts[part]}")


@dataclass(frozen=True, slots=True)
class Unfuse:
    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]

    def member(self, name: str, part: int) -> str:
        """The name that a part would have in a file of its own."""
        return _replace(name, self.name, self.parts[part])


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    num_heads: int
    head_size: int
    num_rotated: int


@dataclass(frozen=True, slots=True)
class Skip:
    suffix: str


@dataclass(frozen=True, slots=True)
class SkipModule:
    name: str


@dataclass(frozen=True, slots=True)
class Spare:
    suffix: str


Rule = Rename | Fuse | Stack | Unstack | Unfuse | Pair | Skip | SkipModule | Spare


@dataclass(frozen=True, slots=True)
class Rules:
    table: tuple[Rule, ...]

    def __add__(self, other: "Rules") -> "Rules":
        return Rules(self.table + other.table)

    def without(self, rule: Rule) -> "Rules":
        """For a model that means something else by one of the names."""
        assert rule in self.table, rule
        return Rules(tuple(other for other in self.table if other != rule))

    def target(self, name: str) -> Target | None:
        """Where the tensor called `name` goes; None when it is not needed."""
        part = 0
        for rule in self.table:
            match rule:
                case Skip(suffix) if _has(name, suffix, at_end=True):
                    return None
                case SkipModule(module) if name.startswith(f"{module}."):
                    return None
                case Rename(old, new, _) if _has(name, old):
                    name = _replace(name, old, new)
                case Fuse(into, parts):
                    for index, source in enumerate(parts):
                        if _has(name, source):
                            name, part = _replace(name, source, into), index
                            break
                case Stack(under, into, parts) if found := _member(name, under, parts):
                    number, source = int(found[1]), found[2]
                    name = _replace(name, f"{under}.{number}.{source}", f"{under}.{into}")
                    part = number * len(parts) + parts.index(source)
        return Target(name, part)

    def unstack(self, name: str) -> Unstack | None:
        """How the tensor called `name` is taken apart before its parts find their targets."""
        for rule in self.table:
            if isinstance(rule, Unstack) and _has(name, f"{rule.under}.{rule.name}", at_end=True):
                return rule
        return None

    def unfuse(self, name: str) -> Unfuse | None:
        """The same of a tensor in which the rows of several lie one behind the other."""
        rules = (rule for rule in self.table if isinstance(rule, Unfuse))
        return next((rule for rule in rules if _has(name, rule.name)), None)

    def pair(self, name: str) -> Pair | None:
        """Which rows of the tensor called `name` are rotated together, if not i and i + half."""
        rules = (rule for rule in self.table if isinstance(rule, Pair))
        return next((rule for rule in rules if _has(name, rule.name)), None)

    def is_spare(self, name: str) -> bool:
        """Whether a run may have no use for the tensor called `name`."""
        return any(
            isinstance(rule, Spare) and _has(name, rule.suffix, at_end=True) for rule in self.table
        )

    def source(self, target: Target) -> str:
        """What the checkpoint calls the tensor that fills `target`: `target` read backwards."""
        name = target.parameter
        for rule in reversed(self.table):
            match rule:
                case Rename(old, new, is_usual=True) if _has(name, new):
                    name = _replace(name, new, old)
                case Fuse(into, parts) if _has(name, into):
                    name = _replace(name, into, parts[target.part])
                case Stack(under, into, parts) if _has(name, f"{under}.{into}"):
                    number, index = divmod(target.part, len(parts))
                    member = f"{under}.{number}.{parts[index]}"
                    name = _replace(name, f"{under}.{into}", member)
                case Unfuse(whole, parts):
                    for part in parts:
                        name = _replace(name, part, whole)
                case Unstack(under, stacked, parts, is_usual=True) if found := _member(
                    name, under, parts
                ):
                    name = _replace(name, f"{under}.{found[1]}.{found[2]}", f"{under}.{stacked}")
        return name


def rules(*table: Rule) -> Rules:
    """Rules are tried in order, each on what the ones before it made of the name."""
    return Rules(table)


def rename(old: str, new: str) -> Rename:
    """`old` stands for whole dot-separated words, anywhere in the name."""
    return Rename(old, new)


def rename_some(old: str, new: str) -> Rename:
    """The same, of some checkpoints; most have another name for it, which a rule knows."""
    return Rename(old, new, is_usual=False)


def fuse(into: str, parts: tuple[str, ...]) -> Fuse:
    """The tensors called `parts` lie one after the other in the parameter called `into`."""
    return Fuse(into, parts)


def stack(under: str, into: str, parts: tuple[str, ...]) -> Stack:
    """`under.N.part`, for all numbers N and each of `parts`, lie one after the other in
    `under.into`: those of number 0 first."""
    return Stack(under, into, parts)


def unstack(under: str, name: str, parts: tuple[str, ...], *, transposed: bool = False) -> Unstack:
    """`under.name` is what `under.N.part` would be for all numbers N and each of `parts`, in one
    tensor: its first dimension counts N, its second one rows, of which each part has every
    `len(parts)`-th. All further ones make up a row. Transposed: rows are the last dimension."""
    return Unstack(under, name, parts, transposed)


def unstack_some(
    under: str, name: str, parts: tuple[str, ...], *, transposed: bool = False
) -> Unstack:
    """The same of some checkpoints, while most have `under.N.part`; the rows of each part lie
    behind those of the part before it."""
    return Unstack(under, name, parts, transposed, takes_turns=False, is_usual=False)


def unfuse(name: str, parts: tuple[str, ...], sizes: tuple[int, ...]) -> Unfuse:
    """The tensor called `name` holds those called `parts`, of so many rows each. It is taken apart
    first: ranks share each of them."""
    return Unfuse(name, parts, sizes)


def pair(name: str, num_heads: int, head_size: int, num_rotated: int) -> Pair:
    """Channels 2i and 2i + 1 of a head are rotated together, of its first `num_rotated`. Rows are
    read in another order, such that those are i and i + half; scores of attention stay the same
    where queries and keys are read so."""
    return Pair(name, num_heads, head_size, num_rotated)


def skip(suffix: str) -> Skip:
    """Tensors whose name ends in `suffix` are left in the file."""
    return Skip(suffix)


def skip_module(name: str) -> SkipModule:
    """The tensors of the module called `name` are left in the file. To be said before renaming."""
    return SkipModule(name)


def spare(suffix: str) -> Spare:
    """Tensors whose name ends in `suffix` stay in the file where no parameter waits for them."""
    return Spare(suffix)


def _has(name: str, words: str, at_end: bool = False) -> bool:
    return f".{words}." in f".{name}." if not at_end else f".{name}".endswith(f".{words}")


def _member(name: str, under: str, parts: tuple[str, ...]) -> re.Match[str] | None:
    """`under.N.part` somewhere in the name: its number and its part."""
    either = "|".join(map(re.escape, parts))
    return re.search(rf"(?:^|\.){re.escape(under)}\.(\d+)\.({either})(?=\.|$)", name)


def _replace(name: str, words: str, by: str) -> str:
    return f".{name}.".replace(f".{words}.", f".{by}.", 1).strip(".")


# What decoder checkpoints call the parts of `layers.decoder.Decoder`.
DECODER_NAMES = rules(
    rename("model.embed_tokens", "embed"),
    rename_some("embed_tokens", "embed"),  # embedding models may leave out the first word
    rename("model.layers", "layers"),
    rename("model.norm", "norm"),
    rename("lm_head", "head"),
    rename("self_attn", "attention"),
    rename("input_layernorm", "input_norm"),
    rename("post_attention_layernorm", "post_norm"),
    rename("k_proj.k_scale", "k_scale"),
    rename("v_proj.v_scale", "v_scale"),
    spare("k_scale"),  # of a quantized KV cache, which this run may not have
    spare("v_scale"),
    spare("k_zero_point"),
    spare("v_zero_point"),
)

# How a model of text and images calls its language model: first as most are published.
TEXT_NAMES = rules(
    *(
        skip_module(f"{prefix}{module}")
        for prefix in ("", "model.")
        for module in ("vision_tower", "vision_model", "multi_modal_projector")
    ),
    rename("language_model.model", "model"),
    rename("language_model.lm_head", "lm_head"),
    rename_some("model.language_model", "model"),
)

# What most checkpoints call the parts of `layers.moe.MoE`; transformers 5 can stack the experts.
MOE_NAMES = rules(
    unstack_some("mlp.experts", "gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    unstack_some("mlp.experts", "down_proj", ("down_proj.weight",)),
    stack("mlp.experts", "gate_up", ("gate_proj", "up_proj")),
    stack("mlp.experts", "down", ("down_proj",)),
    rename("mlp.gate", "mlp.router"),
    rename("mlp.router.e_score_correction_bias", "mlp.router.correction_bias"),
    rename("mlp.shared_expert_gate.weight", "mlp.shared_gate"),
    rename("mlp.shared_expert", "mlp.shared"),
)
