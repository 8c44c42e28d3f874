"""Writes a page of the API reference from the source of a module, without importing it.

What stands behind a parameter, `x: Tensor,  # (n,), float32`, is its description.
"""

import ast
import copy
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A module's name, its public names, and what is written about them."""

    name: str  # without the package: callback, engine.flat
    page: str  # api/callback.md
    tree: ast.Module
    comments: dict[int, str]  # of each line
    public: list[str]
    patched: dict[str, list[Function]] = field(default_factory=dict)  # methods by class


def read(path: Path, package: Path) -> Module:
    """Parse the module at `path`."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    name = ".".join(path.relative_to(package).with_suffix("").parts)
    module = Module(name, f"api/{name.replace('.', '/')}.md", ast.parse(source), comments, [])
    for node in module.tree.body:
        if name_of(node) == "__all__":
            exported = ast.literal_eval(node.value)
            defined = {name_of(node) for node in module.tree.body}
            module.public = [name for name in exported if name in defined]
        if isinstance(node, Function):
            for cls in patched_classes(node):
                if not cls.startswith("_"):
                    module.patched.setdefault(cls, []).append(node)
    return module


def name_of(node: ast.stmt) -> str:
    """Name what a statement defines; the empty string where it defines nothing."""
    if isinstance(node, ast.ClassDef | Function):
        return node.name
    if isinstance(node, ast.Assign):
        return text(node.targets[0])
    return text(node.target) if isinstance(node, ast.AnnAssign) else ""


def patched_classes(f: Function) -> list[str]:
    """Name the classes that fastcore's `@patch` or `@patch_to` gives `f` to."""
    for decorator in f.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "patch_to":
            classes = decorator.args[0]
        elif ast.unparse(decorator).split("(")[0] == "patch" and f.args.args[0].annotation:
            classes = f.args.args[0].annotation
        else:
            continue
        many = isinstance(classes, ast.Tuple)
        return [ast.unparse(c).strip("'") for c in (classes.elts if many else [classes])]
    return []


def symbols(module: Module) -> dict[str, str]:
    """Give the anchor of each public name, and of each method that is patched into a class."""
    found = {name: anchor(name) for name in module.public}
    for cls, methods in module.patched.items():
        for f in methods:
            if not f.name.startswith("_"):
                found[f"{cls}.{f.name}"] = anchor(f"{cls}.{f.name}")
    return found


def anchor(name: str) -> str:
    """Give the anchor of `name` on its page, as nbdev writes it."""
    return name.lower()


def text(node: ast.AST | None) -> str:
    """Write an expression of the source on one line; the empty string for None."""
    return "" if node is None else ast.unparse(node)


def docstring(node) -> str:
    """Give the docstring of `node`, cleaned."""
    doc = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    doc = re.sub(r"\n(?=(Raises|Sync|Source|Note)\b.*?: )", "\n\n", doc)
    return re.sub(r"(?<![(<])(https?://[^\s)]+[^\s).,;])", r"<\1>", doc)


def code(source: str) -> str:
    """Write `source` as code inside of a table or a heading."""
    return f"<code>{escape(source).replace('|', '&#124;')}</code>" if source else ""


def table(rows: list[tuple[str, str, str]]) -> str:
    """Write names, types with defaults, and descriptions; nothing where there are no rows."""
    if not rows:
        return ""
    head = ["| parameter | what it is |", "| --- | --- |"]
    body = (f"| {name} {kind} | {what.replace('|', '&#124;')} |" for name, kind, what in rows)
    return "\n".join([*head, *body]) + "\n"


def parameters(f: Function, comments: dict[int, str]) -> list[tuple[str, str, str]]:
    """List the parameters of `f`, and what it returns, with the comments behind them."""
    given, a = [], f.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + a.defaults
    given += [("", arg, default) for arg, default in zip(plain, defaults, strict=True)]
    given += [("*", a.vararg, None)] if a.vararg else []
    given += [("", arg, d) for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    given += [("**", a.kwarg, None)] if a.kwarg else []
    rows, last = [], f.lineno
    for stars, arg, default in given:
        above = range(last + 1, arg.lineno)  # a long comment stands on lines of its own
        last = (default or arg).end_lineno
        if arg.arg not in ("self", "cls"):
            kind = text(arg.annotation) + (f" = {text(default)}" if default else "")
            lines = [*above, last] if last > f.lineno else []
            what = " ".join(comments[line] for line in lines if line in comments)
            rows.append((code(stars + arg.arg), code(kind), what))
    lines = range(last + 1, f.body[0].lineno)
    what = next((comments[line] for line in lines if line in comments), "")
    if f.returns and f.name != "__init__" and (what or text(f.returns) != "None"):
        rows.append(("*returns*", code(text(f.returns)), what))
    return rows


def signature(f: Function, name: str, comments: dict[int, str]) -> str:
    """Write a table of the parameters, or one line where none is described."""
    rows = parameters(f, comments)
    if any(what for _, _, what in rows):
        return table(rows)
    given = copy.deepcopy(f.args)
    if given.args and given.args[0].arg in ("self", "cls"):
        del given.args[0]
    returns = f" -> {text(f.returns)}" if f.returns and f.name != "__init__" else ""
    return code(f"{name}({text(given)}){returns}") + "\n"


def heading(level: int, name: str, title: str, kind: str = "") -> str:
    """Write a heading with an anchor."""
    badge = f" <small>{kind}</small>" if kind else ""
    return f"{'#' * level} `{title}`{badge} {{ #{anchor(name)} data-toc-label='{title}' }}\n"


def function(f: Function, name: str, level: int, comments: dict[int, str]) -> Iterator[str]:
    """Write what there is to know of a function or a method."""
    decorators = {text(d) for d in f.decorator_list}
    is_property = any("property" in d or "as_prop=True" in d for d in decorators)
    kind = next((d for d in ("classmethod", "staticmethod") if d in decorators), "")
    kind = f"property {code(text(f.returns))}" if is_property else kind
    yield heading(level, name, name, kind)
    yield docstring(f) + "\n"
    if not is_property:
        yield signature(f, f.name, comments)


def fields(cls: ast.ClassDef, comments: dict[int, str]) -> list[tuple[str, str, str]]:
    """List the fields of a dataclass, or other attributes with a type and a comment."""
    rows = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and not text(node.target).startswith("_"):
            default = "" if node.value is None or "field(" in text(node.value) else text(node.value)
            kind = text(node.annotation) + (f" = {default}" if default else "")
            rows.append((code(text(node.target)), code(kind), comments.get(node.end_lineno, "")))
    return rows


def class_(cls: ast.ClassDef, module: Module) -> Iterator[str]:
    """Write what there is to know of a class: how it is made, its fields, its methods."""
    bases = ", ".join(text(b) for b in cls.bases)
    yield heading(2, cls.name, cls.name, f"class of {code(bases)}" if bases else "class")
    yield docstring(cls) + "\n"
    own = [n for n in cls.body if isinstance(n, Function)] + module.patched.get(cls.name, [])
    for f in own:
        if f.name == "__init__":
            yield signature(f, cls.name, module.comments)
    yield table(fields(cls, module.comments))
    yield from methods(cls.name, own, module, 3)


def methods(cls: str, own: list[Function], module: Module, level: int) -> Iterator[str]:
    """Write the public methods that say what they do; setters are with their property."""
    for f in own:
        setter = any(text(d).endswith(".setter") for d in f.decorator_list)
        if not f.name.startswith("_") and docstring(f) and not setter:
            yield from function(f, f"{cls}.{f.name}", level, module.comments)


def page(module: Module, notebook: str) -> str:
    """Write the page of `module`; `notebook` is the address of the page that builds it."""
    out = [f"# mixedfp.{module.name}\n", docstring(module.tree) + "\n"]
    out.append(f"How it is built, with tests: [the notebook]({notebook}).\n" if notebook else "")
    for cls, own in module.patched.items():
        if cls not in module.public:
            out += methods(cls, own, module, 2)
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name in module.public:
            out += class_(node, module)
        elif isinstance(node, Function) and node.name in module.public:
            out += function(node, node.name, 2, module.comments)
        elif name_of(node) in module.public:
            out += [heading(2, name_of(node), name_of(node)), f"```python\n{text(node)}\n```\n"]
            out.append(module.comments.get(node.end_lineno, "") + "\n")
    return "\n".join(part for part in out if part.strip())
