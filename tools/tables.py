"""A pytest plugin: what the tests marked `checks` hold, as tables in the documentation.

    @pytest.mark.checks("GradientClip", "the norm is the one asked for")
    @pytest.mark.checks("Fabric", "a resumed run ends in the same bits", table="15_trainers")

A name in braces is filled in from the test's parameters; the one in `WHERE` says where it holds.
`--tables=write` writes the pages' cells after a run, `--tables=check` fails where one differs.
A table of which no test was run is left alone.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

PAGES = Path(__file__).resolve().parent.parent / "nbs"
WHERE = {"14_callbacks": "precision", "15_trainers": "place"}  # page: the parameter
HEADS = {"14_callbacks": "callback", "15_trainers": "trainer"}
COLUMNS = {"15_trainers": ["one process", "DDP", "FSDP2", "TP"]}  # one for each place
# page: {(subject, law): [(place of a test, where, outcome)]}
found = defaultdict(lambda: defaultdict(list))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--tables", choices=["write", "check"], help=f"in {', '.join(WHERE)}")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "checks(subject, law, table): a line in a table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test's report its lines: reports also come from other processes."""
    for place, item in enumerate(items):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in item.iter_markers("checks"):
            subject, law = (text.format(**params) for text in mark.args)
            table = mark.kwargs.get("table", "14_callbacks")
            line = [table, subject, law, place, str(params.get(WHERE[table], ""))]
            item.user_properties.append(("checks", line))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Gather how a test ended."""
    if report.when == "call" or not report.passed:
        for name, value in report.user_properties:
            if name == "checks":
                table, subject, law, *end = value  # pyright: ignore[reportGeneralTypeIssues]
                found[table][subject, law].append((*end, report.outcome))


def result(ends: list[tuple]) -> str:
    """Say where a law holds, and where not."""
    where = defaultdict(list)
    for _, place, outcome in sorted(ends):
        where[outcome].append(place)
    return "; ".join(f"{', '.join(where[k])}: {k}".removeprefix(": ") for k in sorted(where))


def by_place(table: str) -> Iterator[str]:
    """Yield the lines of a table with a column for each place; a dash where nothing was tried."""
    columns, alike = COLUMNS[table], defaultdict(list)
    yield f"| {HEADS[table]} | what was checked | {' | '.join(columns)} |"
    yield f"|{' --- |' * (2 + len(columns))}"
    for (subject, law), ends in sorted(found[table].items(), key=lambda kv: (min(kv[1]), kv[0])):
        cells = {}
        for _, where, outcome in sorted(ends):
            cells[where] = outcome if cells.get(where, "passed") == "passed" else cells[where]
        alike[law, tuple(cells.get(c, "–") for c in columns)].append(subject)
    for (law, cells), subjects in alike.items():
        names = ", ".join(f"`{name}`" for name in sorted(subjects, key=str.lower))
        yield f"| {names} | {law} | {' | '.join(cells)} |"


def rows(table: str) -> Iterator[str]:
    """Yield the lines: what holds for all first, then one subject after the other."""
    yield f"| {HEADS[table]} | what was checked | result |\n| --- | --- | --- |"
    lines = found[table]
    names = {subject for subject, _ in lines}
    alike = defaultdict(set)
    # in the order of the tests: reports come in any order where several processes run them
    for (subject, law), ends in sorted(lines.items(), key=lambda kv: (min(kv[1]), kv[0])):
        alike[law, result(ends)].add(subject)
    everyone = "every one below"
    if all(subjects == names for subjects in alike.values()):  # none is below
        everyone = ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))
    for (law, end), subjects in alike.items():
        if subjects == names:
            yield f"| {everyone} | {law} | {end} |"
    last = ""
    for (subject, law), ends in sorted(lines.items(), key=lambda kv: (kv[0][0].lower(), kv[1])):
        if alike[law, result(ends)] != names:
            yield f"| {'' if subject == last else f'`{subject}`'} | {law} | {result(ends)} |"
            last = subject


def differs(table: str, write: bool) -> bool:
    """Write a page's cell `table`, or say whether it is another than what was found."""
    path = PAGES / f"{table}.ipynb"
    nb = nbformat.read(path, 4)
    [cell] = [cell for cell in nb.cells if cell.id == "table"]
    text = "\n".join((by_place if table in COLUMNS else rows)(table))
    if not write:
        return cell.source != text
    cell.source = text
    path.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
    return False


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the pages, or hold them against what was found; once, where reports come together."""
    todo = session.config.getoption("--tables")
    if todo is None or hasattr(session.config, "workerinput"):
        return
    for table in sorted(found):
        if differs(table, todo == "write"):
            print(f"\n{table} is not what the tests found. Run its tests with --tables=write")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
