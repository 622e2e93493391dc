"""The pages of the site, before they are built: every public name has one, with docstrings and a way to an example."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.view.browser import CHROMIUM, DRIVER, Browser

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "tools"))

import gallery  # noqa: E402
import public_names  # noqa: E402
import reference  # noqa: E402
import uses  # noqa: E402


@pytest.fixture(scope="module")
def names() -> list[public_names.PublicName]:
    return public_names.public_names()


def test_every_public_name_has_a_page(names: list[public_names.PublicName]) -> None:
    import fbuf
    import interop

    covered = {name for each in names for name in (each.name, *each.others)}
    listed = {f"{package.__name__}.{name}" for package in (fbuf, interop) for name in package.__all__}
    assert listed - covered == {"fbuf.__version__", "interop.__version__"}
    texts = reference.texts()
    pages = {each.name for each in names}
    assert pages <= {name.removesuffix(".md") for name in texts}
    in_tables = re.findall(r"^\| \[([\w.]+)\]", "".join(texts.values()), re.MULTILINE)
    assert sorted(in_tables) == sorted(pages)


def test_every_page_leads_to_an_example(names: list[public_names.PublicName]) -> None:
    """Code of a page or program uses the name; or the signature of a name that is used so has it; or a page explains it."""
    assert [name for name, links in reference.links(names).items() if not links] == []


def test_nothing_public_is_undocumented(names: list[public_names.PublicName]) -> None:
    assert [missing for each in names for missing in public_names.undocumented(each)] == []


def test_an_undocumented_method_is_found() -> None:
    class Here:
        """With a docstring."""

        def public(self) -> None: ...

        def _private(self) -> None: ...

    found = public_names.PublicName("fbuf.Here", (), Here, "Buffers")
    public_names.ROOT, root = Path(__file__).parents[1], public_names.ROOT
    here = public_names.PACKAGES
    try:
        public_names.PACKAGES = ("tests",)
        assert public_names.undocumented(found) == ["fbuf.Here.public"]
    finally:
        public_names.ROOT, public_names.PACKAGES = root, here


LINK = re.compile(r"\]\(<?([^)#:\s>]*)(?:#([^)\s>]+))?>?(?: \"[^\"]*\")?\)")
BESIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/README.md",
)  # pages of the repository


def headings_of(text: str) -> set[str]:
    return {reference.slug(title) for _, title in uses.HEADING.findall(uses.FENCE.sub("", text))}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page to files and headings that do not exist. `make links` follows those to other sites."""
    generated = {gallery.PAGE: gallery.page, reference.FOLDER / "index.md": lambda: reference.texts()["index.md"]}
    found = []
    for path, anchor in LINK.findall(uses.FENCE.sub("", text)):
        target = (page.parent / path if path else page).resolve()
        leaves_site = page.is_relative_to(DOCS) and target.suffix == ".md" and not target.is_relative_to(DOCS)
        if leaves_site or (not target.exists() and target not in generated):
            found.append(f"{page.name}: {path}")
        elif anchor and target.suffix == ".md":
            shown = (
                text if target == page.resolve() else generated[target]() if target in generated else target.read_text()
            )
            found += [f"{page.name}: {path}#{anchor}"] if anchor not in headings_of(shown) else []
    return found


def test_links_between_pages_resolve() -> None:
    """Of written pages and of the gallery; `make docs` checks those of the reference."""
    pages = [*uses.pages(), DOCS / "index.md", *(DOCS.parent / name for name in BESIDE)]
    texts = {page: page.read_text() for page in pages} | {gallery.PAGE: gallery.page()}
    assert [link for page, text in texts.items() for link in broken(page, text)] == []


@pytest.mark.parametrize(
    "link", ["nowhere.md", "../README.md", "#no-heading", "do/install.md#no-heading", "learn/gallery.md#no.py"]
)
def test_a_broken_link_is_found(link: str) -> None:
    page = DOCS / "index.md"
    assert broken(page, f"# Title\n\n[fine](#title), [here]({link})\n") == [f"index.md: {link}"]


def test_the_gallery_shows_what_each_example_learns() -> None:
    """Its curves and time, in the words of the plot; a run stores them and draws."""
    shown = [program.stem for program in gallery.programs()]
    assert sorted(shown) == sorted(gallery.AXES)
    page = gallery.page()
    for program in gallery.programs():
        measured = gallery.measured_of(program)
        assert measured is not None, f"run `make gallery ARGS={program.stem}`"
        assert measured["seconds"] > 0 and measured["waited"] > 0
        assert all(len(x) == len(y) > 1 for x, y in measured["curves"].values()) and measured["curves"]
        assert f"](curves/{program.stem}.svg)" in page and f"python examples/{program.name}" in page


def test_the_images_of_the_gallery_follow_from_the_stored_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    program = gallery.programs()[-1]
    monkeypatch.setattr(gallery, "CURVES", tmp_path)
    drawn = []
    for y in ([1.0, 2.0], [1.0, 2.0], [2.0, 1.0]):
        gallery.draw(program, {"seed 0": ([0.0, 1.0], y)})
        drawn.append((tmp_path / f"{program.stem}.svg").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    "page", [page for page in uses.pages() if "{code-cell}" in page.read_text()], ids=lambda page: page.stem
)
def test_stored_outputs_are_of_the_code_of_the_page(page: Path) -> None:
    stored = json.loads(uses.outputs_of(page).read_text())["cells"]
    cells = [code.strip("\n") for _, code in uses.blocks(page.read_text())]
    assert ["".join(cell["source"]) for cell in stored] == cells, f"run `make tutorials ARGS={page.stem}`"
    assert not any(output["output_type"] == "error" for cell in stored for output in cell["outputs"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_nb")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "2", "-b", "html"]
    done = subprocess.run([*command, "-d", folder / "trees", DOCS, folder / "html"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
    return folder / "html"


@pytest.mark.slow  # builds the whole site
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    assert (site / "searchindex.js").exists()
    script = r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(https?:[^\"]*)"
    style = r"<link\b[^>]*\brel=\"stylesheet\"[^>]*\bhref=\"(https?:[^\"]*)"
    pages = {str(page): page.read_text() for page in site.rglob("*.html")}
    assert {name for name, text in pages.items() if re.search(script, text) or re.search(style, text)} == set()


@pytest.mark.slow
@pytest.mark.skipif(DRIVER is None or CHROMIUM is None, reason="needs Chromium and its driver")
@pytest.mark.parametrize(
    ("words", "page"), [("n-step", "do/nstep.html"), ("crash", "do/resume.html"), ("priority", "do/priorities.html")]
)
def test_the_search_finds_the_right_page_first(site: Path, words: str, page: str) -> None:
    """From files, without a server."""
    with Browser() as browser:
        browser.open(f"{(site / 'search.html').as_uri()}?q={words}")
        first = browser.wait("document.querySelector('ul.search li a')?.getAttribute('href')")
        assert first.partition("?")[0].partition("#")[0] == page
