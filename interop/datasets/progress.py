"""Progress bars for terminals."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from interop.data.arguments import required


@contextlib.contextmanager
def progress(title: str, total: int | None, unit: str, shown: bool | None = None) -> Iterator[Callable[[int], object]]:
    """A context with a progress callback. By default, the bar is shown if stderr is a terminal."""
    shown = sys.stderr.isatty() if shown is None else shown
    if not shown:
        yield lambda count: None
        return
    with required("tqdm", "datasets").tqdm(desc=title, total=total, unit=unit, unit_scale=True) as bar:
        yield bar.update
