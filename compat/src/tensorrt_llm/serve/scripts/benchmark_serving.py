"""`python -m tensorrt_llm.serve.scripts.benchmark_serving`: the benchmark of a running server."""

from penstock.cli.main import benchmark_serving

if __name__ == "__main__":
    benchmark_serving()
