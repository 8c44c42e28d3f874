"""The project's notebooks, and the directives of their cells."""

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = {"hide", "include: false", "include:false"}
_directive = re.compile(r"^\s*#\s*\|\s*(.*?)\s*$")


def all_notebooks() -> list[Path]:
    """List `index.ipynb` and all of `nbs/`, without the hidden files of Jupyter and nbdev."""
    found = [ROOT / "index.ipynb", *sorted((ROOT / "nbs").rglob("*.ipynb"))]
    hidden = re.compile(r"(^|/)[_.]")
    return [p for p in found if p.exists() and not hidden.search(p.relative_to(ROOT).as_posix())]


def title_of(notebook: Path) -> str:
    """Return the first heading of `notebook`."""
    texts = [cell.source for cell in nbformat.read(notebook, as_version=4).cells]
    title = re.search(r"^# (.+)$", "\n".join(texts), flags=re.MULTILINE)
    return title[1].replace("`", "") if title else notebook.stem


def page_of(notebook: Path) -> str:
    """Return the path of the page on the site of `notebook`."""
    if notebook.name == "index.ipynb":
        return "index.md"
    folder = notebook.parent.relative_to(ROOT / "nbs").as_posix()
    name = notebook.stem
    if folder in (".", "engine", "diagnose"):
        name = re.sub(r"^\d+[a-z]?_", "", name)
    return f"{folder}/{name}.md".removeprefix("./")


def directives(source: str) -> list[str]:
    """Return the `#| …` lines at the start of `source`, without their marker."""
    found = []
    for line in source.splitlines():
        match = _directive.match(line)
        if match:
            found.append(match[1])
        elif line.strip():
            break
    return found


def module_of(notebook: Path) -> str:
    """Return the module of `notebook`, such as diagnose.report, or an empty string."""
    cells = nbformat.read(notebook, as_version=4).cells
    found = [d for cell in cells for d in directives(cell.source) if d.startswith("default_exp ")]
    return found[0].removeprefix("default_exp ") if found else ""


def alt_text(cell: nbformat.NotebookNode) -> str:
    """Return the description of the cell's picture from its `#| fig-alt: …` lines."""
    given = [d for d in directives(cell.source) if d.startswith("fig-alt: ")]
    found = " ".join(line.removeprefix("fig-alt: ") for line in given)
    return found or "The picture that this cell draws"


def folded(cell: nbformat.NotebookNode) -> str:
    """Return the summary line for the cell's folded code; empty if the code is shown.

    It comes from `#| code-fold: …`; a cell that mostly imports does not need one.
    """
    given = [d for d in directives(cell.source) if d.startswith("code-fold: ")]
    lines = [line for line in cell.source.splitlines() if line.strip()]
    n_imports = sum(line.startswith(("import ", "from ")) for line in lines)
    if not given and n_imports > max(2, len(lines) / 2):
        return "imports"
    return " ".join(line.removeprefix("code-fold: ") for line in given)


def without_directives(source: str) -> str:
    """Return `source` without the `#| …` lines at its start."""
    lines = source.splitlines()
    while lines and (_directive.match(lines[0]) or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)


def shown(cell: nbformat.NotebookNode) -> bool:
    """Return whether `cell` belongs on the page."""
    if cell.cell_type == "raw":
        return False
    return cell.cell_type != "code" or not HIDDEN.intersection(directives(cell.source))


def without_code(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Replace an `echo: false` cell by its output; return other cells unchanged."""
    if cell.cell_type != "code" or "echo: false" not in directives(cell.source):
        return cell
    texts = [o.data["text/markdown"] for o in cell.outputs if "text/markdown" in o.get("data", {})]
    if texts:
        return nbformat.v4.new_markdown_cell("\n\n".join(map("".join, texts)))
    cell.source = "#| echo: false"  # its picture stays
    return cell
