"""Modules that hash the rows of a tensor."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interop.data.arguments import whole
from interop.maps.table import hash_rows, row_bytes

DEFAULT_COMPONENTS = 16


class SipHash(nn.Module):
    """A 64-bit hash of the bytes of each row, the same in every process and run.

    Despite its name it is not SipHash but a multilinear hash (Lemire & Kaser 2014, see `hash_rows`), which is fast for
    batches. It has no key, so it does not resist crafted collisions. Values are not converted: 0.0 and -0.0 have different
    hashes, and so do equal numbers of different dtypes. bfloat16 is hashed as is; a cast to float16 would merge values.

    Args:
        as_tensor: return int64 hashes; otherwise the unhashed bytes of the rows.
    """

    def __init__(self, as_tensor: bool = True) -> None:
        super().__init__()
        self.as_tensor = as_tensor

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Hash a tensor [B, ...] to int64 [B] on its device, or return a list of B bytes objects. TypeError without dims."""
        if not x.ndim:
            raise TypeError("a tensor without dims has no rows to hash: use x.unsqueeze(0)")
        rows = row_bytes([x], x.shape[:1])
        return torch.from_numpy(hash_rows(rows)).to(x.device) if self.as_tensor else [row.tobytes() for row in rows]


class RandomProjectionHash(SipHash):
    """Hashes a rounded random projection of the last dim, so close rows may have equal hashes.

    `fit` or the first call draws the projection from torch's global generator. It is part of the `state_dict`: load that
    to get equal hashes elsewhere. Products are summed in float64, so a row's hash does not depend on its batch.

    Args:
        n_components: the dimension of the projection.
        dtype_cast: the dtype of rows, projection and result.
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
        self._n_components = whole("n_components", n_components)
        self.dtype_cast = dtype_cast
        self.init_method = nn.init.normal_ if init_method is None else init_method
        self.register_buffer("transform", None)
        self.register_load_state_dict_pre_hook(_accept_transform)

    @property
    def n_components(self) -> int:
        """The dimension of the projection."""
        return self._n_components

    def fit(self, x: Tensor) -> None:
        """Draw the projection `transform`, [x.shape[-1], n_components]."""
        transform = torch.empty(_with_features(x).shape[-1], self.n_components, dtype=self.dtype_cast, device=x.device)
        with torch.no_grad():
            self.init_method(transform)
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Hash the rows of x [B, ..., F]; [B] is treated as [B, 1]. ValueError if F differs from that of `fit`."""
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
    """Load hook: accept a fitted projection into an unfitted module, and the reverse."""
    found = state_dict.get(f"{prefix}transform")
    module.transform = None if found is None else torch.empty_like(found)
