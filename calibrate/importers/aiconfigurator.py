"""Silicon tables of the package ``aiconfigurator-core`` (NVIDIA, Apache-2.0), turned into samples.

The tables stay where they are: in the installed package, in an unpacked wheel, or as single files. Layout of 0.12.0:
``systems/data/<system>/<family>/<stack>/<version>/<table>_perf.parquet``; older releases keep
``systems/data/<system>/<stack>/<version>/<table>_perf.txt`` (CSV). Latencies are milliseconds; message sizes of the
NCCL tables are **elements** (``half`` of 268,435,456 and ``int8`` of 536,870,912 take the same time: 512 MiB).

What no kernel description of ours can state is left out: block-scaled fp8, integer and 4-bit products, an fp8 KV cache.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from calibrate.errors import MeasurementError
from calibrate.importers.nccl_rows import op_name
from calibrate.importers.source import read_text, warn
from calibrate.samples import CollectiveSample, KernelSample, Measurements
from simpar.errors import nearest
from simpar.model.work import DTYPE_BYTES, Attention, AttentionKernel, DType, Gemm

TableKind = Literal["gemm", "context_attention", "generation_attention", "nccl"]
TABLE_KINDS: tuple[TableKind, ...] = ("gemm", "context_attention", "generation_attention", "nccl")

_PACKAGES = ("aiconfigurator_core", "aiconfigurator")
_GEMM_DTYPES: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
_NCCL_BYTES = {"half": 2, "bfloat16": 2, "int8": 1, "float": 4}
# What tells tables apart: attention of prefill and of decode have the same columns, and rows say which they are.
_COLUMNS = {
    "gemm": ("gemm_dtype", "m", "n", "k", "latency"),
    "attention": (
        *("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype", "latency"),
    ),
    "nccl": ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"),
}
# The largest node whose GPUs the tables cover; a larger group's spread over nodes is nowhere written.
_NODE_GPUS = 8
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the package.

    Attributes:
        system: ``h100_sxm``, ``b200_sxm``, ...
        stack: software and version that were measured: ``vllm/0.24.0``, ``nccl/2.29.2``.
        kind: what it holds.
        path: the file.
    """

    system: str
    stack: str
    kind: TableKind
    path: Path


def tables(root: str | Path | None = None, *, system: str | None = None) -> tuple[Table, ...]:
    """The tables that can be imported, ordered by system, kind and stack.

    Args:
        root: any folder above the tables (an unpacked wheel, a checkout); None looks for the installed package.
        system: only those of one system.

    Raises:
        MeasurementError: if the package is not installed, ``root`` holds no tables, or the system is unknown.
    """
    folder = _data_folder(root)
    found = []
    for path in sorted((*folder.glob("*/**/*_perf.parquet"), *folder.glob("*/**/*_perf.txt"))):
        kind = next((k for k in TABLE_KINDS if path.stem == f"{k}_perf"), None)
        if kind is not None:
            found.append(Table(path.relative_to(folder).parts[0], _stack_of(path), kind, path))
    systems = sorted({table.system for table in found})
    if not found:
        raise MeasurementError(
            f"'{folder}' holds no tables (*_perf.parquet); pass the folder 'systems/data' of the package"
        )
    if system is not None and system not in systems:
        raise MeasurementError(
            f"no tables of system '{system}'{nearest(system, systems)} (known: {', '.join(systems)})"
        )
    chosen = [table for table in found if system in (None, table.system)]
    return tuple(sorted(chosen, key=lambda t: (t.system, TABLE_KINDS.index(t.kind), t.stack)))


def read_aiconfigurator(
    system: str,
    *,
    kinds: Sequence[TableKind] = TABLE_KINDS,
    stacks: Sequence[str] = (),
    root: str | Path | None = None,
) -> Measurements:
    """Samples of one system: all chosen tables together.

    Args:
        system: name as in :func:`tables`.
        kinds: which tables.
        stacks: which software, as ``vllm`` or ``vllm/0.24.0``; empty means all.
        root: as for :func:`tables`.

    Raises:
        MeasurementError: if nothing fits, or a table cannot be read.
    """
    known = tables(root, system=system)
    chosen = [
        t for t in known if t.kind in kinds and (not stacks or t.stack in stacks or t.stack.split("/")[0] in stacks)
    ]
    if not chosen:
        offered = ", ".join(sorted({f"{t.kind} of {t.stack}" for t in known}))
        raise MeasurementError(f"no table of {system} fits {', '.join([*kinds, *stacks])} (there are: {offered})")
    read = [read_table(table.path, stack=table.stack) for table in chosen]
    return Measurements(
        kernels=tuple(sample for m in read for sample in m.kernels),
        collectives=tuple(sample for m in read for sample in m.collectives),
        provenance={
            "format": "aiconfigurator-core",
            "license": "Apache-2.0",
            "system": system,
            "device": next((m.provenance["device"] for m in read if "device" in m.provenance), ""),
            "tables": ", ".join(f"{t.kind} {t.stack}" for t in chosen),
        },
    )


def read_table(path: str | Path, *, stack: str | None = None) -> Measurements:
    """Samples of one table (Parquet or CSV); what it holds is told by its columns.

    Raises:
        MeasurementError: if the file is no such table, a row is malformed (with its number), or Parquet cannot be read
            because pyarrow is missing.
    """
    path = Path(path)
    records, first_line = _records(path)
    holds = table_holds(records[0].keys()) if records else ""
    if not holds:
        raise MeasurementError(
            f"'{path}' is no table of GEMM, attention or NCCL times; its columns must be those of aiconfigurator-core"
        )
    stack = _stack_of(path) if stack is None else stack
    left_out: Counter[str] = Counter()
    kernels: list[KernelSample] = []
    collectives: list[CollectiveSample] = []
    for index, record in enumerate(records):
        where = f"{path}:{index + first_line}"
        try:
            time_s = float(record["latency"]) * 1e-3
            made = _collective(record) if holds == "nccl" else _kernel(record, holds)
        except (TypeError, ValueError, KeyError) as problem:
            raise MeasurementError(f"{where}: malformed row ({problem}); mend or remove it") from problem
        if not 0 < time_s < float("inf"):
            raise MeasurementError(f"{where}: latency {record['latency']} ms is not positive; remove the row")
        if isinstance(made, str):
            left_out[made] += 1
        elif isinstance(made, tuple):
            op, nbytes, ranks = made
            collectives.append(CollectiveSample(op, nbytes, ranks, 1, time_s, path.name, stack))
        else:
            kernels.append(KernelSample(made, time_s, path.name, stack))
    if not kernels and not collectives:
        warn(f"{path}: nothing to import ({', '.join(f'{n} rows of {what}' for what, n in left_out.items())})")
    facts = {"format": "aiconfigurator-core", "file": str(path), "device": str(records[0].get("device") or "")}
    if left_out:
        facts["left_out"] = ", ".join(f"{n} rows of {what}" for what, n in left_out.items())
    return Measurements(kernels=tuple(kernels), collectives=tuple(collectives), provenance=facts)


def table_holds(columns: Iterable[str]) -> str:
    """``gemm``, ``attention`` or ``nccl`` if these are the columns of such a table, else an empty string."""
    present = set(columns)
    return next((holds for holds, needed in _COLUMNS.items() if present.issuperset(needed)), "")


def _kernel(record: Record, holds: str) -> Gemm | Attention | str:
    """The kernel of a row, or why it is left out."""
    if holds == "gemm":
        dtype = _GEMM_DTYPES.get(str(record["gemm_dtype"]))
        if dtype is None:
            return f"gemm_dtype {record['gemm_dtype']}"
        # an fp8 linear stores bf16
        return Gemm(int(record["m"]), int(record["n"]), int(record["k"]), dtype, out_bytes=max(DTYPE_BYTES[dtype], 2))
    cache = str(record.get("kv_cache_dtype", "bfloat16"))
    if str(record["attn_dtype"]) != "bfloat16" or cache != "bfloat16":
        return f"attention in {record['attn_dtype']} on a cache in {cache}"
    if int(record.get("beam_width") or 1) != 1:
        return "beam search"
    length, past, heads = int(record["isl"]), int(record.get("step") or 0), int(record["num_heads"])
    decode = length == 1 and (past > 0 or str(record.get("op_name", "")).startswith("generation"))
    window = int(record.get("window_size") or 0)
    return Attention(
        int(record["batch_size"]),
        length,
        length + past,
        heads,
        int(record["num_key_value_heads"]) or heads,
        int(record["head_dim"]),
        # a single query sees every key, which is no triangle
        causal=not decode,
        kernel=_attention_kernel(str(record.get("kernel_source", ""))),
        window=window or None,
    )


def _attention_kernel(source: str) -> AttentionKernel:
    """FlashAttention-3 and later by name; everything else that is fused counts as the second generation."""
    return "flash3" if source.endswith(("fa3", "fa4")) else "flash2"


def _collective(record: Record) -> tuple[str, float, int] | str:
    """Operation, bytes and ranks of a row, or why it is left out."""
    op, size = op_name(str(record["op_name"])), _NCCL_BYTES.get(str(record["nccl_dtype"]))
    if not op or size is None:
        return f"{record['op_name']} of {record['nccl_dtype']}"
    ranks = int(record["num_gpus"])
    if ranks > _NODE_GPUS:
        return f"{op} on {ranks} GPUs"
    return op, float(int(record["message_size"]) * size), ranks


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the number of the first one as an editor (CSV) or a reader (Parquet) counts them."""
    if path.suffix != ".parquet":
        return list(csv.DictReader(io.StringIO(read_text(path)), skipinitialspace=True)), 2
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as problem:
        raise MeasurementError(
            f"reading '{path}' needs pyarrow, which is not installed; install it with: pip install 'simpar[parquet]'"
        ) from problem
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as problem:  # pyarrow's errors derive from these
        raise MeasurementError(f"cannot read '{path}': {problem}; install aiconfigurator-core again") from problem
    return rows, 1


def _data_folder(root: str | Path | None) -> Path:
    if root is not None:
        path = Path(root)
        for inner in ("systems/data", "aiconfigurator_core/systems/data", "data", "."):
            if (path / inner).is_dir() and (inner != "." or path.is_dir()):
                return path / inner
        raise MeasurementError(f"there is no folder '{root}'; pass where aiconfigurator-core was unpacked")
    for package in _PACKAGES:
        # found, not imported: the package loads a compiled extension, and only its files are wanted
        spec = find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            folder = Path(location) / "systems" / "data"
            if folder.is_dir():
                return folder
    raise MeasurementError(
        "the package aiconfigurator-core is not installed: pip install aiconfigurator-core, or unpack its wheel and "
        "pass root=…"
    )


def _stack_of(path: Path) -> str:
    """``<stack>/<version>`` of a table in the package's layout, or an empty string."""
    parts = path.resolve().parts
    return "/".join(parts[-3:-1]) if "data" in parts[:-3] else ""
