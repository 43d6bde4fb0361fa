"""Logs of nccl-tests: rows and headers between whatever else a job prints, with or without prefixes of the launcher."""

import re
from collections import Counter

from calibrate.errors import MeasurementError
from calibrate.importers.nccl_rows import Row, op_name
from calibrate.importers.source import warn

_MODERN = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "wrong") * 2)
# "[1,0]<stdout>:", "[job@1,0]<stdout>:" and "[0]": mpirun --tag-output; they also stand inside rows whose halves were
# flushed apart. A PCI address has colons or an x, so it is never taken for a tag.
_TAG = re.compile(r"\[(?:[^\[\]\s]*@)?\d+(?:,\d+)?\](?:<std(?:out|err)>)?:?[ \t]?|<std(?:out|err)>:?[ \t]?")
_TYPE = re.compile(r"(?:u?int\d*|u?char|half|float|double|bf(?:loat)?16|fp?8\w*)$")
_LABEL = re.compile(r"^\s*\d+:[ \t]")  # srun --label
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?(?:Pid\s+\d+\s+)?on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
_NCCL1_RANK = re.compile(r"#\s+Device\s+\d+\s+->\s+\d+\s+\[[^\]]*\]\s*(.*)")
_CONFIG = re.compile(r"#\s*nThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes")
_PROGRAM = re.compile(r"\b([a-z_]{3,40})_(?:perf|test)\b")
_LIBRARY = re.compile(r"\b(NCCL|RCCL) version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_LIBRARY_CODE = re.compile(r"nccl-library=(\d+)")
_NUMBER = re.compile(r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?$|^N/A$|^[+-]?(?:nan|inf)$", re.IGNORECASE)


class LogReader:
    """Reads one log; a log may hold several runs, one after the other.

    Args:
        source: name of the log in messages.
        in_place: which half of the rows to take.
    """

    def __init__(self, source: str, in_place: bool) -> None:
        self._source, self._in_place = source, in_place
        self._columns: tuple[str, ...] = _MODERN
        self._unit_s = 1e-6
        self._op = self._stack = self._device = ""
        self._local = 0
        self._hosts: list[tuple[int, str]] = []
        self._row: list[str] = []
        self._row_line = 0
        self._warned = False

    @property
    def provenance(self) -> dict[str, str]:
        """Device and library, as the log names them."""
        return {k: v for k, v in {"device": self._device, "stack": self._stack}.items() if v}

    def read(self, text: str) -> list[Row]:
        """Rows with bytes and times, in the order of the log.

        Raises:
            MeasurementError: naming the line of a row with too few, too many or unreadable columns.
        """
        rows = []
        for number, raw in enumerate(text.splitlines(), 1):
            line = _TAG.sub(" ", raw) if "NCCL INFO" not in raw else ""
            line = _LABEL.sub("", line).strip()
            if line.startswith("#"):
                self._header(line)
            elif self._starts_row(line):
                self._expect_finished()
                self._row, self._row_line = line.split(), number
            elif self._row and line and all(_NUMBER.match(token) for token in line.split()):
                self._row += line.split()
            else:
                # anything else between the parts of a row (warnings, prompts) is not part of it
                self._library(raw)
                self._program(line)
            if len(self._row) >= len(self._columns):
                rows.append(self._finished_row())
                self._row = []
        self._expect_finished()
        return [row for row in rows if row is not None]

    def _starts_row(self, line: str) -> bool:
        """Two whole numbers, then the name of a type."""
        tokens = line.split()
        return len(tokens) > 2 and tokens[0].isdigit() and tokens[1].isdigit() and bool(_TYPE.match(tokens[2]))

    def _header(self, line: str) -> None:
        tokens = [token.lstrip("#").lower() for token in line.replace("#", " # ").split() if token != "#"]
        if match := _CONFIG.match(line):
            self._local = int(match[1]) * int(match[2])
            self._hosts = []
        elif match := _RANK.match(line):
            self._hosts.append((int(match[2] or 0), match[3]))
            self._device = match[4].strip() or self._device
        elif match := _NCCL1_RANK.match(line):
            self._hosts.append((0, "localhost"))
            self._device = match[1].strip() or self._device
        elif "algbw" in tokens:
            if tokens[0] not in ("size", "bytes"):
                return
            # before 2.4 the columns had no units, and times were milliseconds
            self._unit_s = 1e-3 if tokens[0] == "bytes" else 1e-6
            names = {
                "bytes": "size",
                "n": "count",
                "op": "redop",
                "cputime": "time",
                "error": "wrong_delta",
                "res": "wrong_delta",
            }
            columns = [names.get(token, token) for token in tokens]
            # a timestamp is printed as date and time of day
            self._columns = tuple(c for name in columns for c in ((name, "") if name == "timestamp" else (name,)))
        else:
            self._library(line)
            self._program(line)

    def _library(self, line: str) -> None:
        if match := _LIBRARY.search(line):
            self._stack = f"{match[1].lower()}/{match[2]}"
        elif (match := _LIBRARY_CODE.search(line)) and not self._stack:
            code = int(match[1])
            self._stack = f"nccl/{code // 10_000}.{code // 100 % 100}.{code % 100}"

    def _program(self, line: str) -> None:
        if "concluded" in line:
            return
        for name in _PROGRAM.findall(line):
            if op_name(name) or "starting" in line:
                self._op = name

    def _expect_finished(self) -> None:
        if self._row:
            raise MeasurementError(
                f"{self._source}:{self._row_line}: the row '{' '.join(self._row)[:60]}' has {len(self._row)} of "
                f"{len(self._columns)} columns ({' '.join(filter(None, self._columns))}); complete it or remove it"
            )

    def _finished_row(self) -> Row | None:
        where = f"{self._source}:{self._row_line}"
        if len(self._row) > len(self._columns):
            raise MeasurementError(
                f"{where}: {len(self._row)} columns instead of {len(self._columns)} "
                f"({' '.join(filter(None, self._columns))}); keep the header of the run, or remove the row"
            )
        starts = [index for index, name in enumerate(self._columns) if name == "time"]
        if len(starts) <= self._in_place:
            return None
        named = dict(zip(self._columns[: starts[0]], self._row, strict=False))
        half = dict(zip(self._columns[starts[self._in_place] :][:4], self._row[starts[self._in_place] :], strict=False))
        for name, text in (*half.items(), ("root", named.get("root", "0"))):
            if not _NUMBER.match(text):
                raise MeasurementError(
                    f"{where}: column {name} holds '{text}', which is no number; mend or remove the row"
                )
        ranks, nodes = self._group()
        wrong = half.get("wrong", "0")
        return Row(
            where=where,
            op=self._op,
            nbytes=float(named["size"]),
            time=half["time"],
            algbw=half.get("algbw", ""),
            busbw=half.get("busbw", ""),
            unit_s=self._unit_s,
            ranks=ranks,
            nodes=nodes,
            reduction=named.get("redop", ""),
            root=int(float(named.get("root", "-1"))),
            wrong=0.0 if wrong.upper() == "N/A" else float(wrong),
            stack=self._stack,
        )

    def _group(self) -> tuple[int, int]:
        """Ranks and hosts of the group of rank 0."""
        first = self._hosts[0][0] if self._hosts else 0
        per_host = Counter(host for group, host in self._hosts if group == first)
        if len(set(per_host.values())) > 1 and not self._warned:
            self._warned = True
            warn(f"{self._source}: hosts hold {sorted(per_host.values())} ranks; they are taken as spread evenly")
        return max(sum(per_host.values()), self._local if not self._hosts else 0), len(per_host)
