"""What the command line says about a dataset. Each dataset reads the fields that it knows."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Lengths are tokens."""

    num_prompts: int = 1000
    seed: int = 0
    dataset_path: str | None = None
    download_path: Path | None = None
    download_timeout: float = 180.0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0  # lengths vary by so much of themselves, both ways
    random_prefix_len: int = 0  # shared by all prompts
    random_ids: bool = False
    tokenize_on_client: bool = False  # send token ids instead of text
    random_image_width: int = 512
    random_image_height: int = 512
    random_image_size: int | None = None  # both at once
    random_num_images: int = 1
    sharegpt_output_len: int | None = None
    sonnet_input_len: int = 550
    sonnet_output_len: int = 150
    sonnet_prefix_len: int = 200
    hf_subset: str | None = None
    hf_split: str | None = None
    hf_output_len: int | None = None
