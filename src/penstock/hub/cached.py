"""What lies in the caches: models fetched by Penstock, and those of the hub's own cache."""

import dataclasses
import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from penstock.errors import ConfigError
from penstock.hub.folder import models_home
from penstock.hub.gguf_file import SUFFIX


@dataclasses.dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # as `serve` takes it
    kind: str  # "gguf", "safetensors" or "hub"
    size_bytes: int
    path: Path


def cached_models(architectures: Collection[str]) -> list[CachedModel]:
    """By name; of the hub's cache only what has one of `architectures`."""
    hub = [
        CachedModel(repo.repo_id, "hub", repo.size_on_disk, repo.repo_path)
        for repo in _hub_repos()
        if _architectures(repo) & set(architectures)
    ]
    return sorted([*_own_models(), *hub], key=lambda model: model.name)


def delete(model: CachedModel) -> None:
    try:
        if model.kind == "hub":
            info = scan_cache_dir(constants.HF_HUB_CACHE)
            [repo] = [repo for repo in info.repos if repo.repo_path == model.path]
            # It deletes by commit alone, and copies of a repository share their commits.
            only = dataclasses.replace(info, repos=frozenset({repo}))
            only.delete_revisions(*(one.commit_hash for one in repo.revisions)).execute()
        else:
            shutil.rmtree(model.path)
    except OSError as error:
        raise ConfigError(f"cannot delete '{model.path}': {error.strerror or error}") from error
    if model.path.exists():  # the hub's library only logs that it may not
        raise ConfigError(f"cannot delete all of '{model.path}'; check who may write there")


def _own_models() -> Iterator[CachedModel]:
    home = models_home()
    for folder in home.iterdir() if home.is_dir() else ():
        if folder.name.startswith(".") or not folder.is_dir():
            continue  # a lock, or a download under way
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        kind = "gguf" if any(folder.glob(f"*{SUFFIX}")) else "safetensors"
        yield CachedModel(folder.name, kind, size_bytes, folder)


def _hub_repos() -> list[CachedRepoInfo]:
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return [repo for repo in repos if repo.repo_type == "model"]


def _architectures(repo: CachedRepoInfo) -> set[str]:
    found: set[str] = set()
    for revision in repo.revisions:
        try:
            config = json.loads((revision.snapshot_path / "config.json").read_bytes())
            found.update(config["architectures"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # not a checkpoint that can be served
    return found
