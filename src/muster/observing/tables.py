"""Tables for notebooks, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

LEFT = " style='text-align:left'"


def html_of_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    cells = (
        f"<tr><th{LEFT}>{escape(name)}</th><td{LEFT}>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"


def html_of_columns(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table with a heading for each column."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = (
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>"
        for line in lines
    )
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"
