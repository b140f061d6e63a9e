"""`Adapter`: low-rank changes of the weights that a request runs with, and where they lie."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`id` names the contents: what is loaded again under the same name has another one."""

    id: str
    name: str
    path: str  # folder in PEFT's layout


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInSlot:
    """The slot of every adapted layer that has it, or takes it now in place of another."""

    adapter: Adapter
    slot: int
