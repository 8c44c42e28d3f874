"""Writes README.md, and its pictures in index_files/, from the outputs saved in index.ipynb.

nbdev's own method needs Quarto, which is not in any package registry. Links to notebooks lead to
their pages on the site, where anchors work and hidden cells are hidden.
`--check` writes nothing; it fails if README.md is out of sync with the notebook.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat
from figures import MARK
from nbconvert import MarkdownExporter
from notebooks import ROOT, alt_text, page_of, shown, without_code, without_directives

PICTURES = "index_files"
SITE = "https://mixedfp.github.io/mixedfp"
# Formats that GitHub shows best come first.
PRIORITY = ["text/markdown", "image/png", "image/jpeg", "image/svg+xml", "text/html", "text/plain"]


def render(path: Path) -> dict[str, bytes]:
    """Return the files generated from the notebook at `path`: content by name."""
    nb = nbformat.read(path, as_version=4)
    cells = [cell for cell in nb.cells if shown(cell)]
    descriptions = {str(i): alt_text(cell) for i, cell in enumerate(cells)}
    nb.cells = [without_code(cell) for cell in cells]
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = MARK.sub("", cell.source)
    nb.metadata.language_info = {"name": "python"}  # nbdev_clean removes it
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.source = without_directives(cell.source)
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    exporter = MarkdownExporter()
    exporter.display_data_priority = PRIORITY
    resources = {"output_files_dir": PICTURES, "unique_key": "figure"}
    text, resources = exporter.from_notebook_node(nb, resources)
    described = rf"!\[png\]\(({PICTURES}/figure_(\d+)_)"
    text = re.sub(described, lambda found: f"![{descriptions[found[2]]}]({found[1]}", text)
    # fastai's and pandas' tables include a style sheet, which GitHub would show as text
    text = re.sub(r"\s*<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"^```python\s*```$", "", text, flags=re.MULTILINE)  # code that is not shown
    text = re.sub(r"\]\((nbs/[^)#]+\.ipynb)(?=[)#])", on_site, text)
    text = re.sub(r"^[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    note = f"<!-- Written by tools/readme.py from {path.name}: edit that, then `make readme`. -->"
    # nbconvert uses the path separator of the current system
    pictures = {Path(name).as_posix(): data for name, data in resources["outputs"].items()}
    return {"README.md": f"{note}\n\n{text}\n".encode(), **pictures}


def on_site(link: re.Match) -> str:
    """Return the start of a link to the site's page of a notebook."""
    return f"]({SITE}/{page_of(ROOT / link[1]).removesuffix('.md')}.html"


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if out of sync")
    args = parser.parse_args()
    folder = ROOT
    wanted = render(ROOT / "index.ipynb")
    present = {"README.md", *(f"{PICTURES}/{p.name}" for p in (folder / PICTURES).glob("*"))}
    stale = sorted(present - wanted.keys())
    changed = [
        name
        for name, data in wanted.items()
        if not (folder / name).exists() or (folder / name).read_bytes() != data
    ]
    if args.check:
        for name in stale + changed:
            print(f"{name} is out of sync with index.ipynb: run `make readme`")
        return 1 if stale or changed else 0
    for name in stale:
        (folder / name).unlink()
    for name in changed:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(wanted[name])
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
