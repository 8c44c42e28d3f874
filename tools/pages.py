"""Writes the site's pages from the notebooks, their outputs as they are kept, and from docstrings.

They lie in `_proc` with a configuration for MkDocs, which makes the site of them: `make docs`.
"""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import nbformat
import reference
from latex2mathml.converter import convert
from notebooks import (
    ROOT,
    all_notebooks,
    alt_text,
    directives,
    folded,
    shown,
    without_code,
    without_directives,
)

OUT = ROOT / "_proc"
PAGES = OUT / "pages"
PICTURES = {"image/png": "png", "image/jpeg": "jpg"}
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", flags=re.DOTALL | re.MULTILINE)
MATH = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<!\s)\$", flags=re.DOTALL)
SECTIONS = {"tutorials": "Learn", "guides": "How to", "": "Inside"}
GUIDES = "which_precision coming_from faq troubleshooting glossary".split()  # in reading order
# neither in the navigation nor in the search: who needs them comes by a link
INTERNAL = "all command compare examples nested sharded testing".split()


def page_of(notebook: Path) -> str:
    """Say where the page of `notebook` lies: its module's name, or its own."""
    if notebook.name == "index.ipynb":
        return "index.md"
    folder = notebook.parent.relative_to(ROOT / "nbs").as_posix()
    name = notebook.stem
    if folder in (".", "engine"):
        name = re.sub(r"^\d+[a-z]?_", "", name)
    return f"{folder}/{name}.md".removeprefix("./")


def is_internal(page: str) -> bool:
    """Say if `page`, or that of a module, is for those who change the package."""
    return page.startswith("engine") or page.removesuffix(".md") in INTERNAL


def relative(target: str, page: str) -> str:
    """Give the address of `target` as `page` has to write it."""
    return os.path.relpath(target, os.path.dirname(page) or ".").replace(os.sep, "/")


class Names:
    """Where each name of the library and each notebook has its page."""

    def __init__(self, modules: list[reference.Module], notebooks: list[Path]):
        self.modules = {module.name: module.page for module in modules}
        places: dict[str, set[str]] = {}
        for module in modules:
            for name, anchor in reference.symbols(module).items():
                for known in {name, name.split(".")[-1], f"mixedfp.{module.name}.{name}"}:
                    places.setdefault(known, set()).add(f"{module.page}#{anchor}")
        for notebook in notebooks:
            page = page_of(notebook)
            for known in (notebook.stem, f"mixedfp.{page[:-3].replace('/', '.')}"):
                places.setdefault(known, set()).add(page)
        self.places = {name: found.pop() for name, found in places.items() if len(found) == 1}

    def link(self, code: str, page: str) -> str:
        """Make a link of `code`, a name between backticks, where it has a page."""
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
    """Put an empty line before each list, without which MkDocs sees none."""
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
    """Write what a cell of `page` gave; a picture, described by `alt`, is a file called `name`."""
    if out.output_type == "stream":
        return fenced(out.text, "{ .text .output }") if out.text.strip() else ""
    data = out.get("data", {})
    for kind, ending in PICTURES.items():
        if kind in data:
            (PAGES / f"{name}.{ending}").parent.mkdir(parents=True, exist_ok=True)
            (PAGES / f"{name}.{ending}").write_bytes(base64.b64decode(data[kind]))
            file = f"{relative(name, page)}.{ending}"
            return f"[![{alt}]({file})]({file})\n"  # on a phone its words are read in full size
    if "text/markdown" in data:
        return data["text/markdown"] + "\n"
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
        table = re.sub(r"\n\s*", "", table).replace(' border="1"', "")
        return f"<div class='output'>{table}</div>\n"
    return fenced(data["text/plain"], "{ .text .output }") if "text/plain" in data else ""


def write_notebook(notebook: Path, names: Names) -> str:
    """Write the page of `notebook`; return its title."""
    page, out = page_of(notebook), []
    nb = nbformat.read(notebook, as_version=4)
    module = page.removesuffix(".md").replace("/", ".")
    for i, cell in enumerate(without_code(cell) for cell in nb.cells if shown(cell)):
        if cell.cell_type == "markdown":
            out.append(prose(cell.source, page, notebook, names) + "\n")
            if module in names.modules and len(out) == 1:  # under the title
                address = relative(names.modules[module], page)
                out.append(f"Reference: [`mixedfp.{module}`]({address}).\n")
            continue
        source = without_directives(cell.source)
        hidden = "echo: false" in directives(cell.source)
        code = fenced(source, "python") if source and not hidden else ""
        if code and (summary := folded(cell)):  # a click away: pictures, and what only checks
            opened = '<details class="code" markdown="1">'
            code = f"{opened}\n<summary>{summary}</summary>\n\n{code}\n</details>\n"
        out.append(code)
        for j, given in enumerate(cell.outputs):
            name = f"pictures/{page.removesuffix('.md')}-{i}-{j}"
            out.append(output(given, page, name, alt_text(cell)))
    text = "\n".join(part for part in out if part)
    write(page, "---\nsearch:\n  exclude: true\n---\n\n" * is_internal(page) + text)
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    return title[1].replace("`", "") if title else notebook.stem


def write(page: str, text: str) -> None:
    """Write a page."""
    (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
    (PAGES / page).write_text(text, encoding="utf-8")


def main() -> None:
    """Write all pages, and the configuration with the list of them."""
    shutil.rmtree(OUT, ignore_errors=True)
    package = ROOT / "mixedfp"
    sources = sorted(p for p in package.rglob("*.py") if not p.stem.startswith("_"))
    modules = [m for m in (reference.read(p, package) for p in sources) if reference.symbols(m)]
    modules = [m for m in modules if not is_internal(m.name)]
    place = {name: i for i, name in enumerate(GUIDES)}
    notebooks = sorted(all_notebooks(), key=lambda path: place.get(path.stem, 0))
    names = Names(modules, notebooks)
    nav: dict[str, list] = {title: [] for title in SECTIONS.values()}
    for notebook in notebooks:
        title, page = write_notebook(notebook, names), page_of(notebook)
        if page != "index.md" and not is_internal(page):
            folder, _, name = page.rpartition("/")
            number = f"{int(name[:2])}. " if folder == "tutorials" else ""
            nav[SECTIONS[folder]].append({number + title: page})
    reference_pages = []
    for module in modules:
        built = f"{module.name.replace('.', '/')}.md"
        text = reference.page(module, relative(built, module.page))
        write(module.page, prose(text, module.page, ROOT / "index.ipynb", names))
        reference_pages.append({module.name: module.page})
    for name in ("CHANGELOG", "CONTRIBUTING"):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        write(f"{name.lower()}.md", prose(text, f"{name.lower()}.md", ROOT / "index.ipynb", names))
    pages = [{"Home": "index.md"}, *({title: found} for title, found in nav.items() if found)]
    pages += [{"API reference": reference_pages}]
    pages += [{"Project": [{"Changes": "changelog.md"}, {"Contributing": "contributing.md"}]}]
    settings = {"INHERIT": "../docs/mkdocs.yml", "docs_dir": "pages", "nav": pages}
    (OUT / "mkdocs.yml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    for extra in (ROOT / "docs" / "extra").iterdir():
        shutil.copy(extra, PAGES / extra.name)


if __name__ == "__main__":
    main()
