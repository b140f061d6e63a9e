"""How much of what the hardware allows a measured load has reached."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.bench.figures import Figures
from penstock.bench.roofline import H200, roofline_of
from penstock.errors import ConfigError

GPUS = {"h200": H200}


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best that `gpu` could do with this load, and the part of it that was reached."""

    gpu: str
    output_throughput: float  # tokens per second
    tpot_ms: float
    throughput_share: float
    tpot_share: float

    @property
    def words(self) -> str:
        return (
            f"{self.throughput_share:.1%} of the {self.output_throughput:.0f} tok/s, "
            f"{self.tpot_share:.1%} of the {self.tpot_ms:.2f} ms per token that one "
            f"{self.gpu.upper()} allows"
        )


def ceiling_of(
    config: Mapping[str, Any], gpu: str, figures: Figures, num_running: int, has_fp8_cache: bool
) -> Ceiling:
    """`config` is the model's config.json; all `num_running` requests are taken to run together."""
    try:
        roofline = roofline_of(
            config.get("text_config", config),
            cache="fp8" if has_fp8_cache else "auto",
            at=GPUS[gpu],
        )
    except KeyError as error:
        raise ConfigError(f"the model's config.json has no {error}: no ceiling is known") from None
    num_in = round(figures.total_input / max(1, figures.completed))
    num_out = max(1, round(figures.total_output / max(1, figures.completed)))
    best = roofline.burst_tok_s(num_running, num_in, num_out)
    tpot_ms = roofline.decode_step_s(num_running, num_in + num_out / 2) * 1e3
    mean_tpot_ms = figures.spreads["tpot"].mean
    return Ceiling(
        gpu,
        best,
        tpot_ms,
        figures.output_throughput / best,
        tpot_ms / mean_tpot_ms if mean_tpot_ms else 0.0,
    )
