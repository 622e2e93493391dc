"""Errors of datasets."""

import difflib
from collections.abc import Collection


class DatasetError(RuntimeError):
    """A dataset cannot be downloaded, read or written. No partial result is left."""


class DownloadError(DatasetError):
    """A download failed: no network, no answer, a missing file, a wrong checksum, or HTML instead of data."""


class CorruptDatasetError(DatasetError):
    """Upstream files, or files of a converted dataset, violate their format."""


class MissingDatasetError(DatasetError, FileNotFoundError):
    """The converted dataset does not exist, and `download` is False."""


def unknown_id(family: str, dataset_id: str, ids: Collection[str]) -> str:
    """The error text for an unknown id, with the nearest names if the list is known."""
    if not ids:
        return f"{family} has no dataset {dataset_id!r}"
    near = difflib.get_close_matches(dataset_id, ids, n=4, cutoff=0.4) or sorted(ids)[:4]
    return f"{family} has no dataset {dataset_id!r}. The nearest of its {len(ids)} ids: {', '.join(map(repr, near))}"
