"""A trace as the PyTorch profiler (Kineto) writes it, a file per rank, for tools that read those.

HolisticTraceAnalysis wants: ``distributedInfo`` with the rank; kernels of category ``kernel`` with stream and
correlation; collectives named as NCCL names its kernels; steps as annotations, of which it drops the last one; and a
launch of the same correlation per kernel. The trace knows no host, so that a launch stands where its kernel starts and
takes no time: what such a tool says about launches means nothing here.
"""

import gzip
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simpar import __version__
from simpar.trace.export import OutputError, write_whole
from simpar.trace.trace import COMMUNICATION_KINDS, KERNEL_KINDS, KINDS, Spans, Trace

Event = dict[str, Any]

_NS_PER_US = 1000
_HOST, _LAUNCHES = "python", 1
_NCCL = {
    "all_reduce": "ncclDevKernel_AllReduce",
    "all_gather": "ncclDevKernel_AllGather",
    "reduce_scatter": "ncclDevKernel_ReduceScatter",
    "all_to_all": "ncclDevKernel_SendRecv",
    "broadcast": "ncclDevKernel_Broadcast",
    "shift": "ncclDevKernel_SendRecv",
    "p2p": "ncclDevKernel_SendRecv",
    "copy": "Memcpy (Pinned <-> Device)",
}
_AFTER_US = 10.0  # length of the step behind the last one, which readers drop


def to_kineto(trace: Trace, folder: str | Path) -> list[Path]:
    """Writes ``rank-N.json.gz`` for every simulated rank into a new folder.

    Args:
        trace: with kernels.
        folder: is made, whole or not at all; one that is there already must have been written by this function.

    Returns:
        The files.

    Raises:
        OutputError: the folder cannot be written, or holds something else.
    """
    folder = Path(folder)
    check_folder(folder)
    made = folder.with_name(f".{secrets.token_hex(8)}.part")
    try:
        made.mkdir()
        for rank in dict.fromkeys(lane.rank for lane in trace.lanes):
            # a space behind each colon: HolisticTraceAnalysis finds ranks by the text '"rank": 0'
            text = json.dumps(kineto(trace, rank), separators=(",", ": "), ensure_ascii=False, allow_nan=False)
            write_whole(made / f"rank-{rank}.json.gz", gzip.compress(text.encode(), 9, mtime=0))
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError as problem:
        reason = problem.strerror or problem
        raise OutputError(f"cannot write '{folder}': {reason}; choose another folder") from problem
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return sorted(folder.iterdir())


def check_folder(folder: Path) -> None:
    """Finds out before the work whether :func:`to_kineto` would write there.

    Raises:
        OutputError: no folder can be made there, or one is there that holds something else.
    """
    if not folder.parent.is_dir():
        raise OutputError(f"cannot write '{folder}': there is no folder '{folder.parent}'; create it first")
    if folder.exists() and not (folder.is_dir() and all(path.match("rank-*.json.gz") for path in folder.iterdir())):
        raise OutputError(f"cannot write '{folder}': it is there and holds something else; choose another name")


def kineto(trace: Trace, rank: int) -> dict[str, Any]:
    """The document of one rank."""
    ranks = {lane.rank: lane for lane in trace.lanes}
    size = sum(lane.replicas for lane in ranks.values())
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "simulated"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": max(size, max(ranks, default=0) + 1)},
        "displayTimeUnit": "ms",
        "producer": f"simpar {__version__}",
        "baseTimeNanoseconds": 0,
        "traceEvents": [*_names(trace, rank), *_steps(trace), *_kernels(trace, rank), *_operations(trace, rank)],
    }


def _names(trace: Trace, rank: int) -> Iterator[Event]:
    def metadata(entry: str, pid: int | str, tid: int, **args: str | int) -> Event:
        return {"ph": "M", "name": entry, "pid": pid, "tid": tid, "ts": 0, "args": args}

    yield metadata("process_name", _HOST, 0, name="python")
    yield metadata("process_labels", _HOST, 0, labels="CPU")
    yield metadata("process_name", 0, 0, name="python")
    yield metadata("process_labels", 0, 0, labels="GPU 0")
    yield metadata("thread_name", _HOST, _LAUNCHES, name="thread 1 (launches)")
    for stream, lane in _streams(trace, rank).items():
        yield metadata("thread_name", 0, stream, name=f"stream {stream} {trace.lanes[lane].stream}")
        yield metadata("thread_sort_index", 0, stream, sort_index=stream)


def _streams(trace: Trace, rank: int) -> dict[int, int]:
    """Number of each stream of a rank, from 7 as in CUDA's default stream, and its lane."""
    return {7 + n: i for n, i in enumerate(i for i, lane in enumerate(trace.lanes) if lane.rank == rank)}


def _steps(trace: Trace) -> Iterator[Event]:
    end = trace.step_ns / _NS_PER_US
    for number, (start, length) in enumerate(((0.0, end), (end, _AFTER_US))):
        yield {
            "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": _HOST, "tid": _LAUNCHES,
            "ts": start, "dur": length, "args": {"External id": number + 1},
        }  # fmt: skip


def _kernels(trace: Trace, rank: int) -> Iterator[Event]:
    """Kernels, and communication that no operation encloses; each with a launch of the same correlation."""
    carries = np.array([KINDS[kind] in (*COMMUNICATION_KINDS, *KERNEL_KINDS) for kind in range(len(KINDS))])
    correlation = 0
    for stream, lane in _streams(trace, rank).items():
        for spans in (trace.spans, trace.kernels()):
            for row in np.flatnonzero((spans.lane == lane) & carries[spans.kind]).tolist():
                correlation += 1
                yield from _kernel(trace, spans, row, stream, correlation)


def _kernel(trace: Trace, spans: Spans, row: int, stream: int, correlation: int) -> Iterator[Event]:
    kind, name = KINDS[spans.kind[row]], trace.names[spans.name[row]]
    start = int(spans.start_ns[row]) / _NS_PER_US
    common = {"External id": correlation, "correlation": correlation}
    yield {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": _HOST, "tid": _LAUNCHES,
        "ts": start, "dur": 0, "args": common,
    }  # fmt: skip
    args: dict[str, Any] = {**common, "device": 0, "context": 1, "stream": stream, "queued": 0}
    for key, value in (("bytes", spans.nbytes[row]), ("flop", spans.flop[row])):
        if value:
            args[key] = float(value)
    yield {
        "ph": "X", "cat": "kernel", "name": _NCCL.get(kind) or f"{kind}: {name}", "pid": 0, "tid": stream,
        "ts": start, "dur": int(spans.duration_ns[row]) / _NS_PER_US, "args": args,
    }  # fmt: skip


def _operations(trace: Trace, rank: int) -> Iterator[Event]:
    """Operations above their kernels, as annotations, which no tool counts as work."""
    spans = trace.spans
    for stream, lane in _streams(trace, rank).items():
        for row in np.flatnonzero((spans.lane == lane) & (spans.flop > 0)).tolist():
            batch = f" {int(spans.microbatch[row])}" if spans.microbatch[row] >= 0 else ""
            yield {
                "ph": "X", "cat": "gpu_user_annotation", "name": f"{KINDS[spans.kind[row]]}{batch}", "pid": 0,
                "tid": stream, "ts": int(spans.start_ns[row]) / _NS_PER_US,
                "dur": int(spans.duration_ns[row]) / _NS_PER_US, "args": {},
            }  # fmt: skip
