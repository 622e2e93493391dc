"""Tokenized datasets in memory-mapped tensors, and their data loaders."""

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from interop.buffers import TensorDictReplayBuffer
from interop.data.arguments import class_of, required, whole
from interop.llm.memmaps import published, to_memmap
from interop.llm.tokenizers import TensorDictTokenizer as TensorDictTokenizer
from interop.samplers import SamplerWithoutReplacement
from interop.shared.source_files import files_below, state_of
from interop.storages import TensorStorage

StrPath = str | os.PathLike[str]

_DROPPED = ("text", "prompt", "label", "valid_sample")
_SCHEMA = 1  # version of the record of a folder's origin


def _local_state(name: str, place: str) -> dict[str, str]:
    """The state of the files in a local folder, as an entry of a record. Empty if they are not there (any more)."""
    folder = Path(place)
    # `datasets` writes its caches beside the files that it reads.
    files = [path for path in files_below(folder) if not path.name.startswith("cache-")] if folder.is_dir() else []
    return {name: state_of(files, folder)} if files else {}


class TokenizedDatasetLoader:
    """Tokenizes a dataset of the Hugging Face hub or of a disk once, and memory-maps the result from then on.

    The tensors are in `<root_dir>/<name>/<split>/<max_length>`; the name is that of the dataset without its owner, up to
    the first "-". They are written to a scratch folder that is renamed when complete, so a killed process leaves no partial
    data. If several processes start together, one tokenizes and the others wait. Folders written by torchrl are replaced,
    since they do not record whether they are complete. A dataset of a disk is tokenized anew when names, sizes or times of
    its files, or of those of the tokenizer's folder, have changed.

    Args:
        split: "train", "valid" or another split of the dataset.
        max_length: the sequence length, in tokens.
        dataset_name: the name in the hub, or with `from_disk` the folder of a saved `DatasetDict`.
        tokenizer_fn: called as `tokenizer_fn(tokenizer, max_length=..., return_tensordict=False)`. It returns a callable
            from a batch of rows to columns of numbers, such as a `TensorDictTokenizer`.
        pre_tokenization_hook: dataset -> dataset, applied before tokenization.
        root_dir: by default `fbuf/data` in `$XDG_CACHE_HOME`, or in `~/.cache`.
        valid_size: the number of rows kept of a split whose name starts with "valid", before the hook.
        num_workers: tokenizing processes, by default half the cores; 1 uses this process. Workers are forked, so JAX warns
            if it was used before.
        tokenizer_class: a class with `from_pretrained`; by default `transformers.AutoTokenizer`.
        tokenizer_model_name: the model whose tokenizer is loaded, by default "gpt2".
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        dataset_name: str,
        tokenizer_fn: Callable[..., Callable[[Any], Any]],
        pre_tokenization_hook: Callable[[Any], Any] | None = None,
        root_dir: StrPath | None = None,
        from_disk: bool = False,
        valid_size: int = 2000,
        num_workers: int | None = None,
        tokenizer_class: Any = None,
        tokenizer_model_name: str | None = None,
    ) -> None:
        name = Path(dataset_name).name.split("-", 1)[0]
        if name in ("", "..") or Path(split).name != split:
            raise ValueError(
                "dataset_name must have a name before the first '-', and split be the name of a folder, got "
                f"{dataset_name!r} and {split!r}"
            )
        max_length = whole("max_length", max_length)
        valid_size = whole("valid_size", valid_size)
        self.split = split
        self.max_length = max_length
        self.dataset_name = dataset_name
        self.tokenizer_fn = tokenizer_fn
        self.pre_tokenization_hook = pre_tokenization_hook
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fbuf" / "data"
        self.root_dir = Path(root_dir or root).expanduser()
        self.from_disk = from_disk
        self.valid_size = valid_size
        cores = max((os.cpu_count() or 1) // 2, 1)
        self.num_workers = whole("num_workers", num_workers) if num_workers else cores
        self.tokenizer_class = tokenizer_class
        self.tokenizer_model_name = tokenizer_model_name or "gpt2"
        self._folder = self.root_dir / name / split / str(max_length)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, made by `make_tokenizer` at first use."""
        return self.make_tokenizer(tokenizer_class=self.tokenizer_class, tokenizer_model_name=self.tokenizer_model_name)

    @staticmethod
    def make_tokenizer(*, tokenizer_class: Any = None, tokenizer_model_name: str = "gpt2") -> Any:
        """Load a tokenizer that pads and truncates on the right, and pads with its end-of-text token.

        ValueError if it has no end-of-text token.
        """
        tokenizer_class = tokenizer_class or required("transformers", "llm").AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(tokenizer_model_name)
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer {tokenizer_model_name!r} has no end-of-text token, which is to pad: set one"
            )
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        return tokenizer

    def load(self) -> TensorDictBase:
        """The memory-mapped tensors, with batch size [rows]. Tokenizes the dataset if they are missing.

        The columns are those of `tokenizer_fn` and of the dataset, without text, prompt, label and valid_sample.

        ValueError if the folder was made with another dataset, tokenizer or hook of that name, a column has non-numbers or
        None, or no rows are left. KeyError if the split is not saved. OSError if the disk is full. After an error nothing is
        written.
        """
        state = {
            **_local_state("local_files", self.dataset_name),
            **_local_state("tokenizer", self.tokenizer_model_name),
        }
        return published(self._folder, {**self._made_from(), **state}, self._make, states=state.keys())

    def _made_from(self) -> dict[str, Any]:
        name = os.path.abspath(self.dataset_name) if self.from_disk else self.dataset_name
        return {
            "schema": _SCHEMA,
            "dataset_name": name,
            "valid_size": self.valid_size if self.split.startswith("valid") else None,
            "tokenizer_fn": _name(self.tokenizer_fn),
            "pre_tokenization_hook": _name(self.pre_tokenization_hook),
            "tokenizer_class": _name(self.tokenizer_class),
            "tokenizer_model_name": self.tokenizer_model_name,
        }

    def _make(self, scratch: Path) -> None:
        tokenize = self.tokenizer_fn(self.tokenizer, max_length=self.max_length, return_tensordict=False)
        dataset = self._rows().map(
            tokenize,
            batched=True,
            num_proc=self.num_workers if self.num_workers > 1 else None,
            load_from_cache_file=False,  # leave no cache beside the dataset
            cache_file_name=os.fspath(scratch / "tokens.arrow"),
            new_fingerprint=scratch.name,
            desc="Tokenizing",
        )
        features = [column for column in dataset.features if column not in _DROPPED]
        self.dataset_to_tensordict(dataset, scratch / "data", features=features)

    def _rows(self) -> Any:
        """The rows of the split, after the hook."""
        datasets = required("datasets", "llm")
        if self.from_disk:
            splits = datasets.load_from_disk(self.dataset_name)
            if not isinstance(splits, Mapping) or self.split not in splits:
                split_names = [*splits] if isinstance(splits, Mapping) else f"a {class_of(splits)}: save a DatasetDict"
                raise KeyError(f"{self.dataset_name!r} has no split {self.split!r}, it has {split_names}")
            dataset = splits[self.split]
        else:
            dataset = datasets.load_dataset(self.dataset_name, split=self.split)
        if self.split.startswith("valid"):
            dataset = dataset.select(range(min(self.valid_size, len(dataset))))
        if self.pre_tokenization_hook is not None:
            dataset = self.pre_tokenization_hook(dataset)
        if len(dataset) == 0:
            raise ValueError(f"no rows of {self.dataset_name!r}, split {self.split!r}, are left to tokenize")
        return dataset

    dataset_to_tensordict = staticmethod(to_memmap)


def create_infinite_iterator(iterator: Iterable[Any]) -> Iterator[Any]:
    """Cycle through an iterable forever. ValueError for an empty pass, such as the second pass of a generator."""
    while True:
        empty = True
        for batch in iterator:
            empty = False
            yield batch
        if empty:
            raise ValueError("there is nothing to iterate over: pass an iterable that gives elements each time")


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: Any,
    device: torch.device | str,
    dataset_name: str | None = None,
    infinite: bool = True,
    prefetch: int = 0,
    split: str = "train",
    root_dir: StrPath | None = None,
    from_disk: bool = False,
    num_workers: int | None = None,
) -> Any:
    """A data loader of a tokenized dataset: each row once an epoch, in random order. The incomplete last batch is dropped.

    Args:
        batch_size: rows per batch.
        block_size: the sequence length, passed to `from_dataset` as `max_length`.
        tensorclass_type: the class of batches, with `from_dataset(split=, dataset_name=, max_length=, root_dir=, from_disk=,
            num_workers=)`, such as `PromptData` or `PairwiseDataset`.
        device: the device of the batches.
        infinite: return an endless generator of batches instead of the `TensorDictReplayBuffer`.
        prefetch: the number of prefetched batches.

    Other arguments are those of `TokenizedDatasetLoader`. ValueError if the dataset has fewer rows than `batch_size`.
    """
    data = tensorclass_type.from_dataset(
        split=split,
        dataset_name=dataset_name,
        max_length=block_size,
        root_dir=root_dir,
        from_disk=from_disk,
        num_workers=num_workers,
    )
    if len(data) < batch_size:
        raise ValueError(f"a batch of {batch_size} rows needs as many, the dataset has {len(data)}")
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(data),
        collate_fn=operator.methodcaller("to", torch.device(device)),
        sampler=SamplerWithoutReplacement(drop_last=True),
        batch_size=batch_size,
        prefetch=prefetch,
    )
    return create_infinite_iterator(buffer) if infinite else buffer


def _name(function: Any) -> str | None:
    """The name of a class or function, equal in all processes."""
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
