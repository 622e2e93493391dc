"""Modules that hash the rows of a tensor."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interop.maps.table import hash_rows, row_bytes

DEFAULT_COMPONENTS = 16


class SipHash(nn.Module):
    """A 64-bit hash of the bytes of each row, the same in every process and run.

    In spite of its name it is not SipHash but a multilinear hash (Lemire & Kaser 2014, see `hash_rows`), which is fast for
    whole batches. It is not keyed: it does not withstand rows that are made to collide. Values are not converted: 0.0 and
    -0.0 have different hashes, and so do equal numbers of different dtypes. bfloat16 is hashed as it is, since a cast to
    float16 would merge values.

    Args:
        as_tensor: return int64 hashes. Without it the bytes of the rows are returned, not hashed.
    """

    def __init__(self, as_tensor: bool = True) -> None:
        super().__init__()
        self.as_tensor = as_tensor

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """int64 [B] of a tensor [B, ...], on its device; or a list of B bytes objects. TypeError without dims."""
        if not x.ndim:
            raise TypeError("a tensor without dims has no rows to hash: use x.unsqueeze(0)")
        rows = row_bytes([x], x.shape[:1])
        return torch.from_numpy(hash_rows(rows)).to(x.device) if self.as_tensor else [row.tobytes() for row in rows]


class RandomProjectionHash(SipHash):
    """A hash of a random projection of the last dim, rounded: near rows may have one hash.

    The projection is drawn from torch's global generator at the first call or by `fit`. It is part of the `state_dict`:
    load that to have the same hashes elsewhere. Products are summed in float64, so a row has one hash in every batch.

    Args:
        n_components: dims of the projection.
        dtype_cast: of the rows, the projection and the result.
        as_tensor: see `SipHash`.
        init_method: fills the projection in place; default `torch.nn.init.normal_`.
    """

    transform: Tensor | None

    def __init__(
        self,
        *,
        n_components: int = DEFAULT_COMPONENTS,
        dtype_cast: torch.dtype = torch.bfloat16,
        as_tensor: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__(as_tensor=as_tensor)
        if n_components < 1:
            raise ValueError(f"n_components must be at least 1, got {n_components}")
        self._n_components = n_components
        self.dtype_cast = dtype_cast
        self.init_method = nn.init.normal_ if init_method is None else init_method
        self.register_buffer("transform", None)
        self.register_load_state_dict_pre_hook(_accept_transform)

    @property
    def n_components(self) -> int:
        """Dims of the projection."""
        return self._n_components

    def fit(self, x: Tensor) -> None:
        """Draw the projection for rows like those of x: `transform` [x.shape[-1], n_components]."""
        transform = torch.empty(_with_features(x).shape[-1], self.n_components, dtype=self.dtype_cast, device=x.device)
        with torch.no_grad():
            self.init_method(transform)
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Hashes of the rows of x [B, ..., F]; [B] is taken as [B, 1]. ValueError for another F than that of `fit`."""
        rows = _with_features(x.detach())
        if self.transform is None:
            self.fit(x)
        assert self.transform is not None
        if rows.shape[-1] != len(self.transform):
            raise ValueError(f"the projection takes {len(self.transform)} features, got x of shape {list(x.shape)}")
        return super().forward((rows.to(self.dtype_cast).double() @ self.transform.double()).to(self.dtype_cast))


def _with_features(x: Tensor) -> Tensor:
    if not x.ndim:
        raise TypeError("a tensor without dims has no rows to hash: use x.unsqueeze(0)")
    return x.unsqueeze(-1) if x.ndim == 1 else x


def _accept_transform(module: RandomProjectionHash, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Copy the projection of a fitted module to one that is not fitted, in either direction."""
    found = state_dict.get(f"{prefix}transform")
    module.transform = None if found is None else torch.empty_like(found)
