"""Errors of datasets."""

import difflib
from collections.abc import Collection


class DatasetError(RuntimeError):
    """A dataset cannot be downloaded, read or written. Nothing is left half-done."""


class DownloadError(DatasetError):
    """A file could not be downloaded: no network, no answer, a missing file, a wrong checksum, HTML as data."""


class CorruptDatasetError(DatasetError):
    """Upstream files, or the files of a converted dataset, are not what their format says."""


class MissingDatasetError(DatasetError, FileNotFoundError):
    """There is no converted dataset, and downloading was not asked for."""


def unknown_id(family: str, dataset_id: str, known: Collection[str]) -> str:
    """The message for an id that is not in the list: the nearest names of it, if the list is known."""
    if not known:
        return f"{family} has no dataset {dataset_id!r}"
    near = difflib.get_close_matches(dataset_id, known, n=4, cutoff=0.4) or sorted(known)[:4]
    return f"{family} has no dataset {dataset_id!r}. The nearest of its {len(known)} ids: {', '.join(map(repr, near))}"
