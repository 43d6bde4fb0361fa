"""A sweep: the same job with some fields varied, every combination a row."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpar import __version__
from simpar.errors import JobError, SimparError
from simpar.job import Job
from simpar.result import Result
from simpar.search.journal import Journal
from simpar.search.records import columns, data_frame, write_records
from simpar.search.vary import changed, locate
from simpar.search.workers import WorkerLostError, Workers
from simpar.simulation import simulate

if TYPE_CHECKING:
    import pandas as pd  # noqa: TID251 - for who asks for a table

Record = dict[str, Any]

_MOST_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class Sweep:
    """The rows of a sweep.

    Attributes:
        rows: one flat record per combination, in order: the varied fields by path, then the figures of the step, or
            ``error`` with the sentence that says why there are none.
        varied: paths of the varied fields.
    """

    rows: tuple[Record, ...]
    varied: tuple[str, ...]

    def records(self) -> list[Record]:
        """The rows, all with the same keys."""
        keys = columns(self.rows)
        return [{key: row.get(key) for key in keys} for row in self.rows]

    def to_dataframe(self) -> "pd.DataFrame":
        """The rows as a pandas table.

        Raises:
            JobError: pandas is not installed.
        """
        return data_frame(self.rows)

    def write(self, path: str | Path) -> None:
        """Writes the rows as CSV, Parquet or JSON lines, by the name's ending.

        Raises:
            JobError: another ending, or Parquet without pandas and pyarrow.
        """
        write_records(self.rows, path)


def sweep(
    job: Job | Mapping[str, Any],
    vary: Mapping[str, Iterable[Any]],
    *,
    allow_oom: bool = True,
    executor: Executor | None = None,
    workers: int | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Simulates a job with every combination of values.

    Args:
        job: the job, or its fields.
        vary: values by path of a field, such as ``{"plan.tp": [1, 2, 4], "cluster.nic_gbps": [200, 400]}``.
        allow_oom: simulate also what does not fit (column ``fits`` says so); otherwise such a row has an error.
        executor: where to run; left open, in processes of this machine.
        workers: processes (left open, one per core; 1 works in this one), or tasks that the executor gets at a time.
        output: file of JSON lines that takes every row as it comes, in any order.
        resume: go on with an existing ``output``.
        progress: is told how many rows are done, and of how many.

    Returns:
        One row per combination; the last field varies fastest.

    Raises:
        JobError: no such field, no values, or the output cannot be written.

    >>> rows = sweep({"model": "gpt2", "cluster": "h100-sxm:4"}, {"plan.tp": [1, 2, 3]}, workers=1).rows
    >>> [row["plan.tp"] for row in rows if "error" in row]
    [3]
    """
    job = Job.model_validate(job)
    values = {path: list(choices) for path, choices in vary.items()}
    places = {path: locate(job, path) for path in values}
    for path, choices in values.items():
        if not choices:
            raise JobError(f"{path}: is given no value; give one or more")
    count = prod(map(len, values.values()))
    if not values or count > _MOST_ROWS:
        raise JobError(f"{count:,} rows are no sweep; vary at least one field, and at most {_MOST_ROWS:,} combinations")
    combinations = list(product(*values.values()))
    shown: Callable[[int, int], None] = progress or (lambda *_: None)
    question = {"sweep": repr(job), "vary": {p: [repr(v) for v in c] for p, c in values.items()}, "simpar": __version__}
    token = pickle.dumps((job, tuple(places.values()), allow_oom))
    rows: dict[int, Record] = {}
    with Journal(output, question, resume=resume) as journal, Workers(executor, workers) as pool:
        rows |= {record["number"]: record["row"] for record in journal.records}
        shown(len(rows), count)
        tasks = ((token, number, combination) for number, combination in enumerate(combinations) if number not in rows)
        for (_, number, combination), answer in pool.run(sweep_row, tasks):
            figures = {"error": str(answer)} if isinstance(answer, WorkerLostError) else answer
            rows[number] = {**dict(zip(values, map(_plain, combination), strict=True)), **figures}
            journal.write({"number": number, "row": rows[number]}, remember=False)
            shown(len(rows), count)
    return Sweep(tuple(rows[number] for number in range(count)), tuple(values))


def _plain(value: Any) -> Any:
    """A value as it stands in a table."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@lru_cache(maxsize=16)  # a worker answers for the same few jobs again and again
def _opened(token: bytes) -> tuple[Job, tuple[tuple[str, ...], ...], bool]:
    opened: tuple[Job, tuple[tuple[str, ...], ...], bool] = pickle.loads(token)
    return opened


def sweep_row(task: tuple[bytes, int, tuple[Any, ...]]) -> Record:
    """The figures of one combination, or its error."""
    token, _, combination = task
    job, places, allow_oom = _opened(token)
    try:
        return figures(simulate(changed(job, zip(places, combination, strict=True)), allow_oom=allow_oom))
    except SimparError as error:
        return {"error": str(error)}
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        # a combination that nobody thought of costs its own row, not the others
        return {"error": f"{type(error).__name__}: {error}"}


def figures(result: Result) -> Record:
    """The figures of a step, flat."""
    low_s, high_s = result.step_time_interval()
    step_s, cluster = result.step_time_s, result.job.cluster
    # where compute and what it waits for take most
    parts = ((sum(rank.compute_s.values()), sum(rank.exposed_s.values())) for rank in result.ranks)
    compute_s, exposed_s = max(parts, key=sum)
    row: Record = {
        "step_time_s": step_s,
        "low_s": low_s,
        "high_s": high_s,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
        "mfu": result.mfu,
        "bubble_fraction": result.bubble_fraction,
        "compute_s": compute_s,
        "exposed_communication_s": exposed_s,
        "memory_bytes": result.peak_memory_bytes,
        "fits": result.fits,
        "gpus": cluster.gpus,
        "dp": result.layout.dp,
        "microbatches": result.layout.microbatches,
        "global_batch": result.layout.global_batch,
    }
    if cluster.price_per_hour is not None:
        row["cost_per_step"] = result.cost().step_price
    return row
