"""Progress bars, where somebody looks at them."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from interop.data.arguments import required


@contextlib.contextmanager
def progress(title: str, total: int | None, unit: str, shown: bool | None = None) -> Iterator[Callable[[int], object]]:
    """The callback for progress. By default a bar is shown if stderr is a terminal."""
    shown = sys.stderr.isatty() if shown is None else shown
    if not shown:
        yield lambda count: None
        return
    with required("tqdm", "datasets").tqdm(desc=title, total=total, unit=unit, unit_scale=True) as bar:
        yield bar.update
