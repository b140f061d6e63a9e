"""What is asked, by the name of a dataset. A new one is a function here or in a file of its own."""

from collections.abc import Callable

from penstock.bench.datasets.files import burstgpt, custom, hub_dataset, sharegpt, sonnet
from penstock.bench.datasets.options import DatasetOptions
from penstock.bench.datasets.synthetic import random, random_ids, random_image
from penstock.bench.records import Ask
from penstock.text.tokenizer import Tokenizer

DATASETS: dict[str, Callable[[DatasetOptions, Tokenizer], list[Ask]]] = {
    "random": random,
    "random-ids": random_ids,
    "random_image": random_image,
    "sharegpt": sharegpt,
    "burstgpt": burstgpt,
    "sonnet": sonnet,
    "custom": custom,
    "trtllm_custom": custom,
    "hf": hub_dataset,
}

__all__ = ["DATASETS", "DatasetOptions"]
