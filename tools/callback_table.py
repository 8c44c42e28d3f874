"""A pytest plugin: what the tests marked `checks` hold, as a table in the documentation.

    @pytest.mark.checks("GradientClip", "the norm is the one asked for")

A name in braces is filled in from the test's parameters; the one called `precision` says where.
`--callback-table=write` writes the page after a run, `--callback-table=check` fails if it differs.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "14_callbacks.ipynb"
INTRO = """# fastai's callbacks

> What fastai's callbacks do in mixed precision, as the tests found it.

The tests in `tests/test_fastai_callbacks.py` write this table and run on every push. *flat* is \
`flat_master=True`, *fp32* the same machinery with `dtype=torch.float32`, where no rounding hides \
anything."""
HEAD = "| callback | what was checked | result |\n| --- | --- | --- |"
HOW_IT_DIFFERS = f"""{PAGE.name} is not what the tests found. Write it with
    pytest tests/test_fastai_callbacks.py --callback-table=write"""
found = defaultdict(list)  # (callback, law): [(place of a test, precision, outcome)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--callback-table", choices=["write", "check"], help=f"the table {PAGE.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "checks(callback, law): a line in the table of callbacks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test's report its lines: reports also come from other processes."""
    for place, item in enumerate(items):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in item.iter_markers("checks"):
            callback, law = (text.format(**params) for text in mark.args)
            line = [callback, law, place, str(params.get("precision", ""))]
            item.user_properties.append(("checks", line))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Gather how a test ended."""
    if report.when == "call" or not report.passed:
        for name, value in report.user_properties:
            if name == "checks":
                callback, law, *end = value
                found[callback, law].append((*end, report.outcome))


def result(ends: list[tuple]) -> str:
    """Say where a law holds, and where not."""
    where = defaultdict(list)
    for _, precision, outcome in sorted(ends):
        where[outcome].append(precision)
    return "; ".join(f"{', '.join(where[k])}: {k}".removeprefix(": ") for k in sorted(where))


def rows() -> Iterator[str]:
    """Yield the lines: what holds for every callback first, then callback by callback."""
    names = {callback for callback, _ in found}
    alike = defaultdict(set)
    # in the order of the tests: reports come in any order where several processes run them
    for (callback, law), ends in sorted(found.items(), key=lambda kv: (min(kv[1]), kv[0])):
        alike[law, result(ends)].add(callback)
    for (law, end), callbacks in alike.items():
        if callbacks == names:
            yield f"| every one below | {law} | {end} |"
    last = ""
    for (callback, law), ends in sorted(found.items(), key=lambda kv: (kv[0][0].lower(), kv[1])):
        if alike[law, result(ends)] != names:
            yield f"| {'' if callback == last else f'`{callback}`'} | {law} | {result(ends)} |"
            last = callback


def page() -> str:
    """Return the notebook that holds the table."""
    texts = {"intro": INTRO, "table": "\n".join([HEAD, *rows()])}
    cells = [nbformat.v4.new_markdown_cell(text, id=name) for name, text in texts.items()]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells)) + "\n"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page, or hold it against what was found; once, where the reports come together."""
    todo = session.config.getoption("--callback-table")
    if todo is None or hasattr(session.config, "workerinput"):
        return
    if todo == "write":
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"\n{HOW_IT_DIFFERS}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
