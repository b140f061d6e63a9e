"""Write the built-in tiny chat model into a folder: make_tiny_checkpoint.py FOLDER [--seed N]."""

import argparse
from pathlib import Path

from penstock.hub.tiny import write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_tiny_model(args.folder, args.seed)


if __name__ == "__main__":
    main()
