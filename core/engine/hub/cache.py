"""Models in Hugging Face's own cache, read from its folders as huggingface_hub lays them out; no network.

A repository's folder holds ``blobs`` (contents, by their digest), ``snapshots/COMMIT`` (links to them) and ``refs``
(branches, by their commit).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import HubError
from .names import CACHE_PREFIX, HubName
from .variants import FOLDER, RepoFile, Variant, named, variants


@dataclass(frozen=True)
class Cached:
    """A model that is here: its name, where to open it, its bytes, and when it came (seconds since 1970)."""

    name: HubName
    path: Path
    variant: Variant
    since: float


def cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    return cache_folder() / (CACHE_PREFIX + repo.replace("/", "--"))


def cached_models() -> list[Cached]:
    """All that can be opened, by name."""
    folders = sorted(cache_folder().glob(f"{CACHE_PREFIX}*--*"))
    repos = (folder.name.removeprefix(CACHE_PREFIX).replace("--", "/", 1) for folder in folders)
    found: list[Cached] = []
    for repo in repos:
        with suppress(PermissionError):  # another person's, in a cache that several share
            found += cached_variants(repo)
    return found


def cached_variants(repo: str, revision: str | None = None) -> list[Cached]:
    """The models of a repository that are here and complete, each from its newest snapshot; of one revision if given."""
    found: dict[str, Cached] = {}
    for snapshot in _snapshots(repo, revision):
        files = [RepoFile(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in _files(snapshot)]
        for variant in variants(files):
            if variant.label in found or (variant.label == FOLDER and not _whole(snapshot)):
                continue
            path = snapshot if variant.label == FOLDER else snapshot / variant.main
            since = (snapshot / variant.main).stat().st_mtime
            found[variant.label] = Cached(HubName(repo, variant.label), path, variant, since)
    return sorted(found.values(), key=lambda one: one.variant.size)


def find(name: HubName) -> Path | None:
    """Where a name's model lies if it is here: of several types the one that came last."""
    here = cached_variants(name.repo, name.revision)
    wanted = name.file or name.variant
    if wanted is None:
        return max(here, key=lambda one: one.since).path if here else None
    try:
        variant = named([one.variant for one in here], wanted, name.repo)
    except HubError:
        return None
    return next(one.path for one in here if one.variant is variant)


def remove(name: HubName) -> int:
    """Takes a model, or all of a repository, out of the cache; the bytes that this frees. Raises HubError."""
    folder = repo_folder(name.repo)
    if not folder.is_dir():
        raise HubError(f"{name.repo} is not in the cache; engine list shows what is.")
    before = _disk(folder)
    wanted = name.file or name.variant
    if wanted is None:
        shutil.rmtree(folder)
        return before
    label = named([one.variant for one in cached_variants(name.repo)], wanted, name.repo).label
    for snapshot in _snapshots(name.repo, None):
        for variant in variants(RepoFile(p.relative_to(snapshot).as_posix(), 0) for p in _files(snapshot)):
            if variant.label == label:
                for file in variant.files:
                    (snapshot / file.path).unlink()
    used = {path.resolve() for snapshot in _snapshots(name.repo, None) for path in _files(snapshot)}
    if not used:
        shutil.rmtree(folder)
        return before
    for blob in (folder / "blobs").iterdir():
        if blob.resolve() not in used:
            blob.unlink()
    return before - _disk(folder)


def _disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _snapshots(repo: str, revision: str | None) -> Iterator[Path]:
    """Folders of snapshots, that of ``main`` first, then the newest; of one revision alone if given."""
    folder = repo_folder(repo)
    if revision is not None:
        commit = _commit(folder, revision) or revision
        if (folder / "snapshots" / commit).is_dir():
            yield folder / "snapshots" / commit
        return
    main = _commit(folder, "main")
    all_of_them = sorted((folder / "snapshots").glob("*"), key=lambda path: (path.name != main, -path.stat().st_mtime))
    yield from (path for path in all_of_them if path.is_dir())


def _commit(folder: Path, revision: str) -> str | None:
    try:
        return (folder / "refs" / revision).read_text().strip()
    except OSError:
        return None


def _files(snapshot: Path) -> Iterator[Path]:
    """Files whose contents are here: a link whose blob is missing is none."""
    for root, _, names in os.walk(snapshot):
        yield from (path for name in names if (path := Path(root) / name).is_file())


def _whole(snapshot: Path) -> bool:
    """Whether the folder has all weights that its index names, or one file instead of them."""
    index, single = snapshot / "model.safetensors.index.json", snapshot / "model.safetensors"
    if not index.is_file():
        return True
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if single.is_file() and single.name not in shards:
        return True
    return all(isinstance(shard, str) and (snapshot / shard).is_file() for shard in shards)
