"""The one file that talks to the Hugging Face hub."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fusion_node.errors import DownloadFailed, UnknownModel
from fusion_node.store.files import sha256_of
from fusion_node.store.progress import Progress


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its bytes, and its SHA-256 in hex where the hub keeps one (large files)."""

    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repository: str
    commit: str
    files: dict[str, HubFile]


class Hub(Protocol):
    """What the store needs of a hub."""

    def describe(self, repository: str, revision: str | None) -> Listing:
        """The files of a repository at the commit that ``revision`` means now.

        Raises:
            UnknownModel: when there is no such repository or revision.
            DownloadFailed: when the hub cannot be reached or refuses.
        """

    def download(self, listing: Listing, names: Collection[str], folder: Path, progress: Progress) -> None:
        """Fetches files into ``folder``, continuing what an earlier call left unfinished.

        Raises:
            DownloadFailed: when a file cannot be fetched or is not the one of the listing.
        """


class HuggingFaceHub:
    """The hub at huggingface.co, or the mirror that HF_ENDPOINT names."""

    def describe(self, repository: str, revision: str | None) -> Listing:
        import huggingface_hub as hf
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            info = hf.HfApi().model_info(repository, revision=revision, files_metadata=True)
        except HFValidationError as error:
            raise UnknownModel(f"{repository} cannot be a repository: {_one_line(error)}") from error
        except GatedRepoError as error:
            raise DownloadFailed(
                f"{repository} is gated: accept its terms on the hub and set HF_TOKEN, then pull again"
            ) from error
        except RevisionNotFoundError as error:
            raise UnknownModel(f"{repository} has no revision {revision}") from error
        except RepositoryNotFoundError as error:
            raise UnknownModel(
                f"the hub has no public model {repository}: check the spelling, or set HF_TOKEN"
            ) from error
        except _network_errors() as error:
            raise DownloadFailed(f"the hub cannot be reached for {repository}: {_one_line(error)}") from error
        if info.sha is None:
            raise DownloadFailed(f"the hub does not name the commit of {repository}")
        files = {
            sibling.rfilename: HubFile(sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)
            for sibling in info.siblings or ()
        }
        return Listing(repository, info.sha, files)

    def download(self, listing: Listing, names: Collection[str], folder: Path, progress: Progress) -> None:
        import huggingface_hub as hf

        total = sum(listing.files[name].num_bytes for name in names)
        progress.start(f"Downloading {listing.repository}", total)
        try:
            hf.snapshot_download(
                listing.repository,
                revision=listing.commit,
                allow_patterns=[_literal(name) for name in names],
                local_dir=folder,
                tqdm_class=_reporting_to(progress),
            )
        except _network_errors() as error:
            raise DownloadFailed(
                f"downloading {listing.repository} was interrupted ({_one_line(error)}); "
                "run the command again to continue"
            ) from error
        progress.start(f"Checking {listing.repository}", total)
        for name in names:
            expected, path = listing.files[name], folder / name
            if not path.is_file() or path.stat().st_size != expected.num_bytes:
                raise DownloadFailed(f"{name} of {listing.repository} did not arrive whole; run the command again")
            if expected.sha256 is not None and sha256_of(path, progress) != expected.sha256:
                path.unlink()
                raise DownloadFailed(f"{name} of {listing.repository} arrived damaged; run the command again")


def _network_errors() -> tuple[type[Exception], ...]:
    """What a failing transfer raises.

    The base error of the HTTP client is taken from the hub's own error, which derives from it: the client has changed
    between releases (requests, httpx, httpx2).
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    bases = [base for base in HfHubHTTPError.__bases__ if base is not Exception and issubclass(base, Exception)]
    return (HfHubHTTPError, LocalEntryNotFoundError, OSError, *bases)


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _literal(name: str) -> str:
    """A pattern that matches this name only."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)


def _reporting_to(progress: Progress) -> type[Any]:
    """A bar for huggingface_hub that draws nothing and passes the bytes on."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm  # untyped
    lock = threading.Lock()  # the hub updates one bar from several download threads

    class Reporter(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the two bars that count bytes, the other one counts what came over the network, after deduplication.
            transfer = str(kwargs.get("desc") or "").startswith("Downloading")
            self._counts = kwargs.get("unit") == "B" and not transfer
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                with lock:
                    progress.advance(int(n))
            return None

    return Reporter
