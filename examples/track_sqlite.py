"""Curves of a job in a table of SQLite: topotrain run --log python:examples.track_sqlite:Sqlite JOB.conf train.py

The file is curves.sqlite in the workspace: select step, value from curves where name = 'loss/group 0'.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import topotrain as tt


class Sqlite(tt.Tracker):
    """Writes all curves into one file, and how the job has ended."""

    def start(self, job: Mapping[str, Any]) -> None:
        self.file = sqlite3.connect(Path(job["workspace"]) / "curves.sqlite")
        self.file.execute("create table if not exists curves (job text, step integer, name text, value real)")
        self.file.execute("create table if not exists ends (job text, code integer)")
        self.job = job["name"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self.file:
            rows = [(self.job, step, name, value) for name, value in values.items()]
            self.file.executemany("insert into curves values (?, ?, ?, ?)", rows)

    def end(self, code: int) -> None:
        with self.file:
            self.file.execute("insert into ends values (?, ?)", (self.job, code))
        self.file.close()
