"""Downloads into Hugging Face's cache that go on where they were interrupted, and are checked by the hub's digests.

huggingface_hub drops what an interrupted download has fetched. So the contents are fetched here, by its own HTTP client, into
``blobs/DIGEST.incomplete``, and it lays links and references to what it then finds complete.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import HubError
from .cache import repo_folder
from .remote import Repository, endpoint, hub_errors
from .variants import FOLDER, RepoFile, Variant, size

Progress = Callable[[str, int, int], None]
"""What is done, how many bytes of it, of how many."""
_CHUNK = 1 << 22
_TOKENS = re.compile(r"[0-9a-f]+")


def download(repository: Repository, variant: Variant, progress: Progress | None) -> Path:
    """The model's path once all of its files are here. Raises HubError; what was fetched stays for the next time."""
    repo = repository.name.repo
    with hub_errors(repo):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it retries by itself
        _check_room(repository, variant)
        meter = _Meter(progress, repo, variant.size)
        paths = []
        for file in variant.files:
            _fetch_blob(repository, file, meter)
            revision = repository.name.revision or "main"
            paths.append(hf_hub_download(repo, file.path, revision=revision, endpoint=endpoint()))
    first = Path(paths[0])
    return first.parent if variant.label == FOLDER else first


def holds(repository: Repository, variant: Variant) -> bool:
    """Whether all files of the model are here, as the hub has them now."""
    return all((_snapshot(repository) / file.path).is_file() for file in variant.files)


def _snapshot(repository: Repository) -> Path:
    return repo_folder(repository.name.repo) / "snapshots" / repository.commit


def _check_room(repository: Repository, variant: Variant) -> None:
    blobs = repo_folder(repository.name.repo) / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    begun = sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
    missing = sum(file.size for file in variant.files if not _snapshot(repository).joinpath(file.path).is_file())
    free = shutil.disk_usage(blobs).free
    if missing - begun > free:
        raise HubError(
            f"{variant.label} of {repository.name.repo} takes {size(missing - begun)} more, and {size(free)} are free in {blobs};"
            " engine rm makes room, or HF_HOME names another place."
        )


class _Meter:
    """Bytes that are here, and how fast they come."""

    def __init__(self, progress: Progress | None, repo: str, total: int) -> None:
        self._progress = progress
        self._repo = repo
        self._total = total
        self._done = 0
        self._fetched = 0
        self._began = time.monotonic()

    def found(self, count: int) -> None:
        """Bytes that were here already."""
        self._done += count

    def lost(self, count: int) -> None:
        """Bytes that have to be fetched again."""
        self._done -= count

    def came(self, count: int) -> None:
        self._done += count
        self._fetched += count
        if self._progress is None:
            return
        rate = self._fetched / max(time.monotonic() - self._began, 1e-3)
        left = (self._total - self._done) / rate
        text = f"{self._repo}: {size(self._done)} of {size(self._total)}, {size(rate)}/s, {max(left, 0):.0f} s left"
        self._progress(text, self._done, self._total)

    def checking(self, file: str) -> None:
        if self._progress is not None:
            self._progress(f"Checking {file}", self._done, self._total)


class _Metered:
    """A file that tells a meter what is written to it."""

    def __init__(self, file: BinaryIO, meter: _Meter) -> None:
        self._file = file
        self._meter = meter

    def write(self, data: bytes) -> int:
        self._meter.came(len(data))
        return self._file.write(data)

    def truncate(self) -> int:
        """The server has begun anew."""
        before = self._file.seek(0, os.SEEK_END)
        self._meter.lost(before)
        return self._file.truncate(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _fetch_blob(repository: Repository, file: RepoFile, meter: _Meter) -> None:
    """The file's contents under their digest, checked."""
    from filelock import FileLock
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    repo = repository.name.repo
    url = hf_hub_url(repo, file.path, revision=repository.commit, endpoint=endpoint())
    found = get_hf_file_metadata(url)
    etag = str(found.etag)
    if not _TOKENS.fullmatch(etag):
        raise HubError(f"The hub tells no digest of {file.path} in {repo}; try again later.")
    folder = repo_folder(repo)
    blob, locks = folder / "blobs" / etag, folder.parent / ".locks" / folder.name
    if not blob.exists():  # or a cache that another owns would have to be written
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{etag}.lock"):  # where huggingface_hub has it, so that a download of its own waits
            if not blob.exists():
                _fetch(url, blob, file, found.size or file.size, meter)
                return
    meter.found(blob.stat().st_size)


def _fetch(url: str, blob: Path, file: RepoFile, expected: int, meter: _Meter) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    partial = blob.with_name(f"{blob.name}.incomplete")
    with partial.open("ab") as opened:
        here = opened.tell()
        if here > expected:
            opened.truncate(0)
            here = 0
        meter.found(here)
        target: Any = _Metered(opened, meter)
        http_get(url, target, resume_size=here, headers=build_hf_headers(), expected_size=expected)
    meter.checking(file.path)
    if not _intact(partial, blob.name):
        partial.unlink()
        raise HubError(f"{file.path} came damaged: its digest is not the one that the hub tells; pull it again.")
    partial.replace(blob)


def _intact(path: Path, digest: str) -> bool:
    """Whether the contents are those of the digest: SHA-256, or that of a git blob. Other digests say nothing."""
    if len(digest) == 64:
        hashed = hashlib.sha256()
    elif len(digest) == 40:
        hashed = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    else:
        return True
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest() == digest
