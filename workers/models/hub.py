"""Finds a model of the hub in the hub client's cache, or fetches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.workers.errors import ModelError, first_line

# Seconds within which the hub must list a repository's files.
PATIENCE = 10


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files of a repository are the model.

    ``cached`` are patterns of the files to look for in the cache, ``never`` patterns of files to ignore. ``among`` chooses
    the published files to fetch, as names or patterns; ``place`` finds the model in a snapshot (None: it is not there), and
    ``lacking`` says which of its files are missing ("": none).
    """

    cached: Sequence[str]
    among: Callable[[Sequence[str]], Sequence[str]]
    place: Callable[[Path], Path | None]
    lacking: Callable[[Path], str]
    never: Sequence[str] = ()


def from_hub(name: str, repository: str, wanted: Wanted, fetch: bool) -> Path:
    """``name`` is the model's name in sentences. Missing files are fetched; without ``fetch`` they are an error."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):  # the system does not know the user, as in some containers
        raise ModelError(
            f'"{name}" is not a directory, and there is no home directory to keep models of a hub in: set HOME or HF_HOME, '
            "or give a directory"
        )
    path, lacking = _in_cache(name, repository, wanted)
    if path is not None and not lacking:
        return path
    if not fetch:
        why = f" as a whole ({lacking})" if lacking else ""
        raise ModelError(
            f'"{name}" is not on this machine{why}, and a plan downloads nothing, so its size is unknown: plan after '
            "a run has downloaded it, or give sizes with --model-bytes and --draft-bytes"
        )
    if constants.HF_HUB_OFFLINE and lacking:
        raise ModelError(
            f'the download of "{name}" is not complete ({lacking}), and HF_HUB_OFFLINE is set: unset it where there is a '
            "network, and the rest is fetched, or give a directory"
        )
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f'"{name}" is neither a directory nor in the local cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE '
            "is set: give a directory, or unset it where there is a network"
        )
    return _fetched(name, repository, wanted, lacking)


def _in_cache(name: str, repository: str, wanted: Wanted) -> tuple[Path | None, str]:
    """The model in the local cache (None: it is not there), and which of its files are missing ("": none)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = snapshot_download(
            repository,
            local_files_only=True,
            allow_patterns=[*wanted.cached],
            ignore_patterns=[*wanted.never] or None,
        )
    except HFValidationError as error:
        raise ModelError(f'"{name}" is neither a directory nor a name that a model hub could have') from error
    except LocalEntryNotFoundError as error:
        # Client versions that cache the list of published files (attribute "snapshot_path") say which ones are missing.
        return None, first_line(error) if hasattr(error, "snapshot_path") else ""
    path = wanted.place(Path(cached))
    return path, "" if path is None else wanted.lacking(path)


def _fetched(name: str, repository: str, wanted: Wanted, lacking: str) -> Path:
    """The model, downloaded. ``lacking``: the files that the local cache lacks, if it has others."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        published = [entry.rfilename for entry in HfApi().model_info(repository, timeout=PATIENCE).siblings or []]
        chosen = [*wanted.among(published)]
        snapshot = Path(snapshot_download(repository, allow_patterns=chosen, ignore_patterns=[*wanted.never] or None))
        return wanted.place(snapshot) or snapshot / chosen[0]
    except ModelError:
        raise
    except RepositoryNotFoundError as error:
        raise ModelError(f'the model hub has no "{repository}", or this user may not read it') from error
    except Exception as error:  # the client's transport, and so its error types, depend on its version
        if lacking:
            raise ModelError(
                f'the download of "{name}" is not complete ({lacking}), and the model hub cannot be reached ({error}): run '
                "this again where there is a network, and the rest is fetched, or give a directory"
            ) from error
        raise ModelError(
            f'"{name}" is neither a directory nor in the local cache ({constants.HF_HUB_CACHE}), and the model hub cannot '
            f"be reached ({error}): give a directory, or fill the cache where there is a network"
        ) from error
