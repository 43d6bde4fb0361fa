"""Answers on disk, line by line as they come, so that a run that was cut off goes on where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from simpar.errors import JobError

Record = dict[str, Any]

_QUESTION = "question"  # key of the first line
_BROKEN = object()


class Journal:
    """A file of JSON lines: what was asked, then one record per answer, each on disk before the next one is awaited.

    Args:
        path: the file, or None to keep nothing.
        question: what a run must have in common with that of an existing file to go on with it.
        resume: go on with an existing file.

    Raises:
        JobError: the file exists and must not be continued, belongs to another question, or cannot be written.
    """

    def __init__(self, path: str | Path | None, question: Mapping[str, Any], *, resume: bool) -> None:
        self.records: list[Record] = []
        self._file: TextIO | None = None
        if path is None:
            return
        path = Path(path)
        asked = json.loads(json.dumps(question))
        try:
            if path.exists() and path.stat().st_size:
                if _holds_nothing(path):
                    os.truncate(path, 0)
                elif resume:
                    self._read(path, asked)
                else:
                    raise JobError(f"{path}: exists already; resume it (--resume) or choose another name")
            self._file = path.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self.write({_QUESTION: asked}, remember=False)
        except OSError as error:
            raise JobError(f"{path}: cannot be written ({error.strerror}); choose another file") from None

    def _read(self, path: Path, asked: Record) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # what was cut off in the middle of a line is asked again
        lines = [_value(line) for line in whole.splitlines()] or [None]
        first, *records = lines
        found = first.get(_QUESTION) if isinstance(first, dict) else None
        if not isinstance(found, dict):
            raise JobError(f"{path}: is not a file of this command, so nothing is added; choose another name")
        if _BROKEN in records:
            number = lines.index(_BROKEN) + 1
            raise JobError(f"{path}:{number}: is no JSON; remove that line, and go on with the others")
        different = [key for key in asked | found if asked.get(key) != found.get(key)]
        if different:
            raise JobError(
                f"{path}: was made with another {', '.join(different)}; choose another name, or ask the same again"
            )
        self.records = records
        if len(whole) < len(text):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def write(self, record: Mapping[str, Any], *, remember: bool = True) -> None:
        """Adds a record and waits until it is on disk."""
        if remember:
            self.records.append(dict(record))
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()


def _value(line: bytes) -> Any:
    """The value of a line, or what stands for one that has none."""
    try:
        return json.loads(line)
    except ValueError:
        return _BROKEN


def _holds_nothing(path: Path) -> bool:
    """Whether a run was cut off before its question was on disk, so that there is no answer that could be lost."""
    begins = json.dumps({_QUESTION: {}}).removesuffix("}}").encode()
    with path.open("rb") as file:
        line = file.readline()
    return not line.endswith(b"\n") and (line.startswith(begins) or begins.startswith(line))
