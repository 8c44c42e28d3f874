"""Reads modules from their source, without importing them, and writes their reference pages.

The comment after a parameter, `x: Tensor,  # (n,), float32`, is its description. The comment
after `**kwargs` names in backticks the function that accepts them, whose parameters are listed.
"""

import ast
import inspect
import io
import re
import tokenize
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import wrap

Function = ast.FunctionDef | ast.AsyncFunctionDef
INSTANCES = {"Learner": "learn."}  # the usual name of an instance of the class
LONGEST = 80  # maximum characters of a one-line signature
CALLED_BY_OTHERS = re.compile(r"_|(before|after)_")  # methods, including by fastai's training loop


@dataclass
class Parameter:
    """A parameter, a field of a class, or a return value."""

    name: str  # with its stars; a single star: keyword-only parameters follow
    type: str = ""
    default: str = ""
    what: str = ""


@dataclass
class Entry:
    """A constant, function, method or class, as described by its source."""

    name: str  # Learner.to_fp16
    doc: str
    kind: str = ""  # shown after the name in the heading
    call: str = ""  # start of the signature: learn.to_fp16
    parameters: list[Parameter] = field(default_factory=list)
    returns: Parameter | None = None
    passed: set[str] = field(default_factory=set)  # arguments it passes along with **kwargs
    methods: list["Entry"] = field(default_factory=list)
    source: str = ""  # of a constant
    example: str = ""  # a link

    @property
    def anchor(self) -> str:
        """Return the anchor on the page, in nbdev's format."""
        return self.name.lower()

    @property
    def is_described(self) -> bool:
        """Return whether a comment describes a parameter or the return value."""
        given = [*self.parameters, self.returns]
        return any(one and one.what for one in given)

    @property
    def summary(self) -> str:
        """Return the first sentence of the docstring."""
        return re.split(r"(?<=\.)\s|\n\n", self.doc)[0].replace("\n", " ")


@dataclass
class Module:
    """A module, its entries, and the public names that it imports from other modules."""

    name: str  # without the package: callback, engine.flat
    doc: str
    entries: list[Entry]
    imported: list[str]

    @property
    def page(self) -> str:
        """Return the address of its page."""
        return f"api/{self.name.replace('.', '/')}.md"


def complete(modules: list[Module], everything: list[Module]) -> None:
    """Add imported entries to `modules`, and replace their `**kwargs` by the real parameters."""
    known = {e.name: e for m in everything for e in m.entries}
    known |= {f"mixedfp.{m.name}.{e.name}": e for m in everything for e in m.entries}
    for module in modules:
        module.entries += [known[name] for name in module.imported]
        for entry in module.entries:
            for one in (entry, *entry.methods):
                show_kwargs(one, known)


def show_kwargs(entry: Entry, known: dict[str, Entry]) -> None:
    """Replace `**kwargs` by the optional parameters of the function that its comment names."""
    last = entry.parameters[-1] if entry.parameters else Parameter("")
    taker = re.search(r"`([\w.]+)`", last.what)
    if not (last.name.startswith("**") and taker):
        return
    if taker[1] not in known:
        raise LookupError(f"{entry.name}: `{taker[1]}`, which accepts its **kwargs, is not public")
    own = {p.name for p in entry.parameters} | entry.passed
    others = [p for p in known[taker[1]].parameters if p.default and p.name not in own]
    entry.parameters[-1:] = [Parameter("*"), *others]


def read(path: Path, package: Path) -> Module:
    """Read the module at `path`."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    tree = ast.parse(source)
    nodes = {name_of(node): node for node in tree.body}
    public = ast.literal_eval(nodes["__all__"].value) if "__all__" in nodes else []
    entries = []
    for node in tree.body:  # methods of other packages' classes come first
        if isinstance(node, Function) and "patch" in map(text, node.decorator_list):
            entries.append(read_function(node, comments, text(node.args.args[0].annotation)))
    for name, node in nodes.items():
        if name not in public:
            continue
        if isinstance(node, ast.ClassDef):
            entries.append(read_class(node, comments))
        elif isinstance(node, Function):
            entries.append(read_function(node, comments))
        else:
            entries.append(Entry(name, comments.get(node.end_lineno or 0, ""), source=text(node)))
    name = ".".join(path.relative_to(package).with_suffix("").parts)
    imported = [name for name in public if name not in nodes]
    return Module(name, docstring(tree), entries, imported)


def name_of(node: ast.stmt) -> str:
    """Return the name that a statement defines; an empty string if it defines none."""
    if isinstance(node, ast.ClassDef | Function):
        return node.name
    if isinstance(node, ast.Assign):
        return text(node.targets[0])
    return text(node.target) if isinstance(node, ast.AnnAssign) else ""


def text(node: ast.AST | None) -> str:
    """Write a source expression on one line; an empty string for None."""
    return "" if node is None else ast.unparse(node).replace(" ** ", "**")


def docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    """Return the cleaned docstring of `node`."""
    doc = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    doc = re.sub(r"\n(?=(Raises|Sync|Source|Note)\b.*?: )", "\n\n", doc)
    return re.sub(r"(?<![(<])(https?://[^\s)]+[^\s).,;])", r"<\1>", doc)


def read_function(f: Function, comments: dict[int, str], cls: str = "") -> Entry:
    """Read a function, or a method of the class `cls`."""
    decorators = {text(d) for d in f.decorator_list}
    entry = Entry(f"{cls}.{f.name}" if cls else f.name, docstring(f))
    if any("property" in d for d in decorators):
        entry.kind = f"property {code(text(f.returns))}"
        return entry
    entry.kind = next((d for d in ("classmethod", "staticmethod") if d in decorators), "")
    entry.call = INSTANCES.get(cls, "") + f.name
    entry.parameters = parameters(f, comments)
    if f.returns:
        lines = range(f.returns.lineno, f.body[0].lineno)
        what = next((comments[line] for line in lines if line in comments), "")
        entry.returns = Parameter("*returns*", text(f.returns), what=what)
    for node in ast.walk(f):
        if isinstance(node, ast.Call) and any(k.arg is None for k in node.keywords):
            entry.passed |= {k.arg for k in node.keywords if k.arg}
    return entry


def parameters(f: Function, comments: dict[int, str]) -> list[Parameter]:
    """List the parameters of `f` with their comments."""
    given, a = [], f.args
    defaults = [None] * (len(a.args) - len(a.defaults)) + a.defaults
    given += [("", arg, default) for arg, default in zip(a.args, defaults, strict=True)]
    given += [("*", a.vararg or ast.arg(""), None)] if a.vararg or a.kwonlyargs else []
    given += [("", arg, d) for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    given += [("**", a.kwarg, None)] if a.kwarg else []
    found, last = [], f.lineno
    for stars, arg, default in given:
        if not arg.arg:
            found.append(Parameter(stars))
            continue
        above = range(last + 1, arg.lineno)  # a long comment has its own lines
        last = (default or arg).end_lineno
        if arg.arg not in ("self", "cls"):
            lines = [*above, last] if last > f.lineno else []
            what = " ".join(comments[line] for line in lines if line in comments)
            found.append(Parameter(stars + arg.arg, text(arg.annotation), text(default), what))
    return found


def read_class(cls: ast.ClassDef, comments: dict[int, str]) -> Entry:
    """Read a class: its constructor and its methods."""
    bases = ", ".join(b for b in map(text, cls.bases) if not b.startswith("_"))
    entry = Entry(cls.name, docstring(cls), f"class of {code(bases)}" if bases else "class")
    is_record = "NamedTuple" in bases or any("dataclass" in text(d) for d in cls.decorator_list)
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and is_record and not text(node.target).startswith("_"):
            default = "..." if "field(" in text(node.value) else text(node.value)
            what = comments.get(node.end_lineno or 0, "")
            one = Parameter(text(node.target), text(node.annotation), default, what)
            entry.call = cls.name
            entry.parameters.append(one)
        elif isinstance(node, Function) and node.name == "__init__":
            entry.call, entry.parameters = cls.name, parameters(node, comments)
        elif isinstance(node, Function) and not CALLED_BY_OTHERS.match(node.name):
            setter = any(text(d).endswith(".setter") for d in node.decorator_list)
            if docstring(node) and not setter:
                entry.methods.append(read_function(node, comments, cls.name))
    return entry


def code(source: str) -> str:
    """Write `source` as code inside a table or a heading."""
    return f"<code>{escape(source)}</code>" if source else ""


def table(*rows: list[str]) -> str:
    """Write a table whose first row is its header; phones show the other rows as blocks."""
    head, *others = ([cell.replace("|", "&#124;") for cell in row] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others)]
    return "\n".join(['<div class="reference" markdown="1">\n', *lines, "\n</div>\n"])


def signature(entry: Entry) -> str:
    """Write the signature of an entry, on one or more lines; with types if no table has them."""
    given = []
    for p in entry.parameters:
        typed = f"{p.name}: {p.type}" if p.type and not entry.is_described else p.name
        equals = "=" if typed == p.name else " = "
        given.append(f"{typed}{equals}{p.default}" if p.default else typed)
    returns = f" -> {entry.returns.type}" if entry.returns else ""
    line = f"{entry.call}({', '.join(given)}){returns}"
    if len(line) > LONGEST:
        inside = wrap(", ".join(given), LONGEST - 4, break_on_hyphens=False)
        line = "\n    ".join([f"{entry.call}(", *inside]) + f"\n){returns}"
    return f"``` {{ .python .signature }}\n{line}\n```\n"


def parameter_table(entry: Entry) -> str:
    """Write names, types with defaults, and descriptions."""
    rows = [["name", "type = default", "description"]]
    for p in [p for p in entry.parameters if p.name != "*"]:
        rows.append([code(p.name), code(p.type + (f" = {p.default}" if p.default else "")), p.what])
    if entry.returns and entry.returns.what:
        rows.append(["*returns*", code(entry.returns.type), entry.returns.what])
    return table(*rows)


def describe(entry: Entry, level: int) -> list[str]:
    """Write an entry under a heading of the given level."""
    badge = f" <small>{entry.kind}</small>" if entry.kind else ""
    label = entry.name if level == 2 else entry.name.split(".")[-1]
    anchor = f"{{ #{entry.anchor} data-toc-label='{label}' }}"
    out = [f"{'#' * level} `{entry.name}`{badge} {anchor}\n"]
    out.append(f"```python\n{entry.source}\n```\n" if entry.source else "")
    out.append(signature(entry) if entry.call else "")
    out.append(entry.doc + "\n")
    out.append(f"Example: {entry.example}.\n" if entry.example else "")
    out.append(parameter_table(entry) if entry.is_described else "")
    for method in entry.methods:
        out += describe(method, level + 1)
    return out


def page(module: Module, notebook: str) -> str:
    """Write the page of `module`, which `notebook` exports."""
    out = [f"# mixedfp.{module.name}\n", module.doc + "\n"]
    out.append(f"How to use it and how it is built: [the notebook]({notebook}).\n")
    for entry in module.entries:
        out += describe(entry, 2)
    return "\n".join(part for part in out if part.strip())


def index(modules: list[Module]) -> str:
    """Write the page of all public names, grouped by module, with a line for each."""
    out = ["# API reference\n"]
    for module in modules:
        address = module.page.removeprefix("api/")
        rows = [[f"[{code(e.name)}]({address}#{e.anchor})", e.summary] for e in module.entries]
        out += [f"## mixedfp.{module.name}\n", module.doc + "\n"]
        out.append(table(["name", "description"], *rows))
    return "\n".join(out)
