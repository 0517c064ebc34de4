"""What the hub has: a repository's files, by huggingface_hub; and its faults as sentences."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import EngineError, HubError
from .names import HubName
from .variants import RepoFile

_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR}


class UnreachableError(HubError):
    """The hub does not answer."""


@dataclass(frozen=True)
class Repository:
    """A repository at a commit."""

    name: HubName
    commit: str
    files: tuple[RepoFile, ...]


def look_up(name: HubName) -> Repository:
    """The repository's files. Raises HubError."""
    with hub_errors(name.repo):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=endpoint()).model_info(name.repo, revision=name.revision, files_metadata=True)
        files = tuple(RepoFile(file.rfilename, file.size or 0) for file in info.siblings or ())
        return Repository(name, str(info.sha), files)


def endpoint() -> str:
    """The hub's address; HF_ENDPOINT names another."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns what goes wrong between here and the hub into HubError."""
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{repo} is not in the cache, and HF_HUB_OFFLINE is set; take it out of the environment to download."
        )
    where = f"{endpoint()}/{repo}"
    try:
        yield
    except (KeyboardInterrupt, EngineError):
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: accept its terms at {where}, then run `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"Neither this machine nor the hub has {repo}: check the name; a private model needs `hf auth login` or HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo} has no such revision; its page {where} lists the branches.") from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{repo} has no such file; its page {where} lists the files.") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise HubError(
                f"The hub answers {error.response.status_code} for {repo}: run `hf auth login`, or set HF_TOKEN to a token that"
                " may read it."
            ) from error
        raise HubError(f"The hub answers {error.response.status_code} for {repo}; try again later.") from error
    except OSError as error:
        if error.errno in _OF_DISKS:
            place = error.filename or constants.HF_HUB_CACHE
            raise HubError(f"{place} cannot be written: {error.strerror}; HF_HOME names another place.") from error
        raise _unreachable(error) from error
    except Exception as error:  # of the HTTP client, which differs between versions of huggingface_hub
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> UnreachableError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return UnreachableError(
        f"The hub at {endpoint()} cannot be reached ({reason}); models that engine list shows need no network."
    )
