"""Figures as the table that people's scripts already read: 50 columns, values from column 42 on."""

from collections.abc import Iterator, Sequence

from penstock.bench.figures import Figures, Spread, shown

WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def table(figures: Figures, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    return "\n".join(_lines(figures, metrics, percentiles))


def by_other_formulas(figures: Figures) -> str:
    """Behind the table: what the Llama recipe's key metrics are, where the table's differ."""
    return (
        f"all tokens alike: mean ITL {figures.itl_per_token_ms:.2f} ms; first token to last: "
        f"output {figures.output_throughput_first_to_last:.2f} tok/s, total "
        f"{figures.total_token_throughput_first_to_last:.2f} tok/s"
    )


def failures(figures: Figures, errors: Sequence[str]) -> str:
    """Before the table, and only where something failed."""
    frame, said = "!" * WIDTH, "The figures are those of the other requests."
    first = f"Total failed requests: {figures.num_failed}"
    return "\n".join([first, frame, said, *errors, frame])


def _lines(figures: Figures, metrics: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield row("Successful requests:", figures.completed)
    yield row("Benchmark duration (s):", figures.duration_s)
    yield row("Total input tokens:", figures.total_input)
    yield row("Total generated tokens:", figures.total_output)
    yield row("Request throughput (req/s):", figures.request_throughput)
    if figures.request_goodput is not None:
        yield row("Request goodput (req/s):", figures.request_goodput)
    yield row("Output token throughput (tok/s):", figures.output_throughput)
    yield row("Total Token throughput (tok/s):", figures.total_token_throughput)
    yield row("User throughput (tok/s):", figures.user_throughput)
    for name in metrics:
        yield from spread_lines(name, figures.spreads[name], percentiles)
    yield "=" * WIDTH


def spread_lines(
    name: str, spread: Spread, percentiles: Sequence[float], of: str = ""
) -> Iterator[str]:
    """A section on one latency. `of` says which requests, where it is not all."""
    short, title = _TITLES[name]
    yield f"{f'{title}, {of}' if of else title:-^{WIDTH}}"
    yield row(f"Mean {short} (ms):", spread.mean)
    yield row(f"Median {short} (ms):", spread.median)
    for percent in percentiles:
        yield row(f"P{shown(percent)} {short} (ms):", spread.percentile(percent))


def row(name: str, value: float) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {text:<10}"
