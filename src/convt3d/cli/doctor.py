"""``convt3d doctor``."""

from __future__ import annotations

import json

import typer

from convt3d.cli.common import AsJson, console, escape


def doctor(as_json: AsJson = False) -> None:
    """Report GPU, driver, NVRTC, versions, cache, and what will be accelerated here."""
    from convt3d import doctor as examination

    findings = examination.examine()
    if as_json:
        print(json.dumps(examination.to_dict(findings), indent=1))
    else:
        from rich.table import Table

        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        marks = {True: "[green]ok[/] ", False: "[red]!![/] ", None: ""}
        for finding in findings:
            table.add_row(finding.name, marks[finding.ok] + escape(finding.text))
        console().print(table)
    if any(f.name == "self-test" and f.ok is False for f in findings):
        raise typer.Exit(1)
