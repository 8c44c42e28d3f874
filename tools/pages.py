"""Writes the site's pages from the notebooks, with their saved outputs, and from docstrings.

They are in `_proc`, from which MkDocs builds the site: `make docs`. `docs/mkdocs.yml` lists them.
"""

import base64
import os
import re
import shutil
from pathlib import Path

import nbformat
import reference
import yaml
from latex2mathml.converter import convert
from markdown.extensions.toc import slugify
from notebooks import (
    ROOT,
    all_notebooks,
    alt_text,
    directives,
    folded,
    module_of,
    page_of,
    shown,
    title_of,
    without_code,
    without_directives,
)

OUT = ROOT / "_proc"
PAGES = OUT / "pages"
PICTURES = {"image/png": "png", "image/jpeg": "jpg"}
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", flags=re.DOTALL | re.MULTILINE)
MATH = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<!\s)\$", flags=re.DOTALL)
ALL_NAMES = "api/index.md"
SETTINGS = ROOT / "docs" / "mkdocs.yml"
# The pages of each section in reading order. Other pages are for contributors: the search
# excludes them, and they are reached by links.
SECTIONS = {
    title: [page for entry in pages for page in entry.values()]
    for section in yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))["nav"]
    for title, pages in section.items()
}
LISTED = [page for pages in SECTIONS.values() for page in pages]
PREFERRED = [*SECTIONS["Start"], *SECTIONS["Learn"], *SECTIONS["How to"]]  # by the search


def relative(target: str, page: str) -> str:
    """Return the address of `target` relative to `page`."""
    return os.path.relpath(target, os.path.dirname(page) or ".").replace(os.sep, "/")


class Names:
    """The page of each name in the library and of each notebook."""

    def __init__(self, modules: list[reference.Module], notebooks: list[Path]):
        self.modules = {module.name: module.page for module in modules}
        places: dict[str, set[str]] = {}
        for module in modules:
            for entry in module.entries:
                name = entry.name
                for known in {name, name.split(".")[-1], f"mixedfp.{module.name}.{name}"}:
                    places.setdefault(known, set()).add(f"{module.page}#{entry.anchor}")
        for notebook in notebooks:
            page = page_of(notebook)
            for known in (notebook.stem, f"mixedfp.{module_of(notebook)}"):
                places.setdefault(known, set()).add(page)
        self.places = {name: found.pop() for name, found in places.items() if len(found) == 1}

    def link(self, code: str, page: str) -> str:
        """Turn `code`, a name in backticks, into a link if it has a page."""
        name = re.sub(r"\(.*\)$", "", code.strip("`"))
        name = f"Learner.{name[6:]}" if name.startswith("learn.") else name
        place = self.places.get(name)
        if code.startswith("```") or place is None or place.split("#")[0] == page:
            return code
        return f"[{code}]({relative(place, page)})"


def formula(match: re.Match) -> str:
    """Write LaTeX as MathML, which a browser shows without a script."""
    return convert(match[1] or match[2], display="block" if match[1] else "inline")


def prose(text: str, page: str, notebook: Path, names: Names) -> str:
    """Write markdown for MkDocs: formulas, links to names, links between notebooks."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = MATH.sub(formula, part)
        elif not re.search(r"(\[|^#.*)\Z", parts[i - 1], flags=re.MULTILINE):
            parts[i] = names.link(part, page)  # neither in a link nor in a heading

    def other_page(match: re.Match) -> str:
        target = (notebook.parent / match[1]).resolve()
        return f"]({relative(page_of(target), page)}{match[2] or ''})"

    text = spaced_lists("".join(parts))
    return re.sub(r"\]\((?!\w+:)([^)#]+\.ipynb)(#[^)]*)?\)", other_page, text)


def spaced_lists(text: str) -> str:
    """Insert an empty line before each list, which MkDocs requires."""
    out, in_code = [], False
    for line in text.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        item = re.match(r"[-*] |\d+\. ", line) and not in_code
        if item and out and out[-1] and not re.match(r"[-*] |\d+\. |\s", out[-1]):
            out.append("")
        out.append(line)
    return "\n".join(out)


def fenced(text: str, kind: str) -> str:
    """Write a block of code or output, with a fence longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence} {kind}\n{text.rstrip()}\n{fence}\n"


def output(out: nbformat.NotebookNode, page: str, name: str, alt: str) -> str:
    """Write an output of a cell on `page`; a picture, described by `alt`, is saved as `name`."""
    if out.output_type == "stream":
        return fenced(out.text, "{ .text .output }") if out.text.strip() else ""
    data = out.get("data", {})
    for kind, ending in PICTURES.items():
        if kind in data:
            (PAGES / f"{name}.{ending}").parent.mkdir(parents=True, exist_ok=True)
            (PAGES / f"{name}.{ending}").write_bytes(base64.b64decode(data[kind]))
            file = f"{relative(name, page)}.{ending}"
            return f"[![{alt}]({file})]({file})\n"  # lets a phone show its text in full size
    if "text/markdown" in data:
        return data["text/markdown"] + "\n"
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
        table = re.sub(r"\n\s*", "", table).replace(' border="1"', "")
        return f"<div class='output'>{table}</div>\n"
    return fenced(data["text/plain"], "{ .text .output }") if "text/plain" in data else ""


def summary_of(cell: nbformat.NotebookNode, page: str) -> str:
    """Return the summary line for folded code; a how-to page folds the code of its module too."""
    if "export" not in directives(cell.source) or page not in SECTIONS["How to"]:
        return folded(cell)
    names = re.findall(r"^(?:def|class) ([A-Za-z]\w*)", cell.source, flags=re.MULTILINE)
    return f"source of {', '.join(names)}" if names else "imports"


def write_notebook(notebook: Path, names: Names) -> None:
    """Write the page of `notebook`."""
    page, out = page_of(notebook), []
    nb = nbformat.read(notebook, as_version=4)
    module = module_of(notebook)
    for i, cell in enumerate(without_code(cell) for cell in nb.cells if shown(cell)):
        if cell.cell_type == "markdown":
            out.append(prose(cell.source, page, notebook, names) + "\n")
            if module in names.modules and not any(out[:-1]):  # under the title
                address = relative(names.modules[module], page)
                out.append(f"Reference: [`mixedfp.{module}`]({address}).\n")
            continue
        source = without_directives(cell.source)
        hidden = "echo: false" in directives(cell.source)
        code = fenced(source, "python") if source and not hidden else ""
        if code and (summary := summary_of(cell, page)):  # folded: code for pictures and checks
            opened = '<details class="code" markdown="1">'
            code = f"{opened}\n<summary>{summary}</summary>\n\n{code}\n</details>\n"
        out.append(code)
        for j, given in enumerate(cell.outputs):
            name = f"pictures/{page.removesuffix('.md')}-{i}-{j}"
            out.append(output(given, page, name, alt_text(cell)))
    write(page, "\n".join(part for part in out if part))


def write(page: str, text: str) -> None:
    """Write a page, with its settings for the search."""
    head = "---\nsearch: {boost: 2}\n---\n\n" if page in PREFERRED else ""
    if page == ALL_NAMES:
        head = "---\nsearch: {exclude: true}\n---\n\n"
    if page not in LISTED:
        head = "---\nsearch: {exclude: true}\nhide: [navigation]\n---\n\n"
    (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
    (PAGES / page).write_text(head + text, encoding="utf-8")


def first_calls(names: set[str], notebooks: list[Path]) -> dict[str, tuple[str, str]]:
    """Find the first section that calls each name: its address and its title."""
    found = {}
    for notebook in notebooks:
        page, title = page_of(notebook), title_of(notebook)
        section = page, title
        for cell in filter(shown, nbformat.read(notebook, as_version=4).cells):
            if cell.cell_type == "markdown":
                for heading in re.findall(r"^##+ (.+)$", cell.source, flags=re.MULTILINE):
                    section = f"{page}#{slugify(heading, '-')}", f"{title}: {heading}"
            elif not summary_of(cell, page) and "echo: false" not in directives(cell.source):
                called = {name for name in names - found.keys() if calls(cell.source, name)}
                found |= dict.fromkeys(called, section)
    return found


def calls(source: str, name: str) -> bool:
    """Return whether `source` calls the function, class or method `name`, or inherits from it."""
    cls, _, method = name.rpartition(".")
    before = r"\." if cls else r"(?<!def )(?<!class )(?<![.\w])"
    return bool(re.search(rf"{before}{method}\(|class \w+\({method}\b", source))


def read_reference(notebooks: list[Path]) -> list[reference.Module]:
    """Read the modules that have a page, with names for users first, and add examples."""
    package = ROOT / "mixedfp"
    sources = sorted(p for p in package.rglob("*.py") if not p.stem.startswith("_"))
    everything = {module.page: module for module in (reference.read(p, package) for p in sources)}
    modules = [everything[page] for page in SECTIONS["API reference"] if page != ALL_NAMES]
    reference.complete(modules, list(everything.values()))
    examples = first_calls({entry.name for m in modules for entry in m.entries}, notebooks)
    for_users = {name for name, (address, _) in examples.items() if "/" in address}
    for_users.update(everything["api/all.md"].imported)
    for module in modules:
        module.entries.sort(key=lambda e: "." not in e.name and e.name not in for_users)
        for entry in module.entries:
            address, title = examples.get(entry.name, ("", ""))
            entry.example = f"[{title}]({relative(address, module.page)})" if address else ""
    return modules


def main() -> None:
    """Write all pages, and the configuration next to them."""
    shutil.rmtree(OUT, ignore_errors=True)
    notebooks = {page_of(notebook): notebook for notebook in all_notebooks()}
    home = notebooks["index.md"]
    users = [notebooks[page] for page in LISTED if page in notebooks and page != "index.md"]
    modules = read_reference(users)
    names = Names(modules, list(notebooks.values()))
    homes = {module_of(notebook): page for page, notebook in notebooks.items()}
    for notebook in notebooks.values():
        write_notebook(notebook, names)
    texts = {}
    for module in modules:
        built = relative(homes[module.name], module.page)
        texts[module.page] = reference.page(module, built)
    texts[ALL_NAMES] = reference.index(modules)
    for name in ("CHANGELOG", "CONTRIBUTING"):
        texts[f"{name.lower()}.md"] = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    for page, text in texts.items():
        write(page, prose(text, page, home, names))
    shutil.copy(SETTINGS, OUT)
    for extra in (ROOT / "docs" / "extra").iterdir():
        shutil.copy(extra, PAGES)


if __name__ == "__main__":
    main()
