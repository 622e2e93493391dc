"""The outputs of pages with code cells: stored as notebooks in `docs/outputs`, and given to the build as its cache.

    python docs/tools/stored_outputs.py [NAME ...]     # execute these pages, or all, and store what they print and draw

A tutorial trains for a minute or more, and the site is built in less than three. The build takes the stored outputs of a
page whose code is the stored code, and executes all others.
"""

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).parent))

import uses


def cache(folder: Path) -> Path:
    """A new cache in a folder, with all stored outputs."""
    from jupyter_cache import get_cache

    shutil.rmtree(folder, ignore_errors=True)
    outputs = get_cache(str(folder))
    for each in sorted(uses.OUTPUTS.glob("*.ipynb")):
        outputs.cache_notebook_file(str(each), check_validity=False)
    return folder


def execute(page: Path) -> float:
    """Execute a tutorial and store its outputs. Returns the seconds it took."""
    import nbclient
    import nbformat

    notebook = code_of(page)
    begin = time.perf_counter()
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(page.parent))
    uses.OUTPUTS.mkdir(exist_ok=True)
    nbformat.write(notebook, uses.outputs_of(page))
    return time.perf_counter() - begin


def code_of(page: Path) -> "NotebookNode":
    """The code cells of a page, read as the build reads them."""
    from myst_nb.core.read import read_myst_markdown_notebook

    notebook = read_myst_markdown_notebook(page.read_text())
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for at, cell in enumerate(notebook.cells):
        cell.id = f"cell-{at}"
    return notebook


def executed_pages() -> list[Path]:
    return [page for page in uses.pages() if "{code-cell}" in page.read_text()]


if __name__ == "__main__":
    for page in executed_pages():
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            print(f"{page.stem}: {execute(page):.0f} s", flush=True)
