"""Files of a trace by the ending of their name."""

from collections.abc import Callable
from pathlib import Path

from simpar.errors import JobError
from simpar.trace.export import to_csv, to_perfetto
from simpar.trace.kineto import check_folder, to_kineto
from simpar.trace.protobuf import messages, to_protobuf
from simpar.trace.table import arrow, to_parquet
from simpar.trace.trace import Trace

_Writer = Callable[[Trace, Path, bool], None]


def _folder(trace: Trace, path: Path, kernels: bool) -> None:  # noqa: ARG001 - it always has them
    to_kineto(trace, path)


_WRITERS: dict[str, _Writer] = {
    ".json.gz": lambda trace, path, kernels: to_perfetto(trace, path, kernels=kernels),
    ".json": lambda trace, path, kernels: to_perfetto(trace, path, kernels=kernels),
    ".pb": lambda trace, path, kernels: to_protobuf(trace, path, kernels=kernels),
    ".pb.gz": lambda trace, path, kernels: to_protobuf(trace, path, kernels=kernels),
    ".pftrace": lambda trace, path, kernels: to_protobuf(trace, path, kernels=kernels),
    ".parquet": lambda trace, path, kernels: to_parquet(trace, path, kernels=kernels),
    ".csv": lambda trace, path, kernels: to_csv(trace, path, kernels=kernels),
    ".csv.gz": lambda trace, path, kernels: to_csv(trace, path, kernels=kernels),
    ".kineto": _folder,
}

FORMATS = tuple(_WRITERS)
"""Endings of names: Perfetto's JSON and protobuf, tables, and a folder as the PyTorch profiler writes it."""


def check_format(path: str | Path) -> str:
    """The ending by which a trace would be written.

    Raises:
        JobError: it is none of :data:`FORMATS`.
    """
    name = Path(path).name.lower()
    found = next((suffix for suffix in sorted(FORMATS, key=len, reverse=True) if name.endswith(suffix)), None)
    if found is None:
        raise JobError(
            f"'{path}' does not say in which format to write the trace; end the name with {', '.join(FORMATS)}"
        )
    return found


def check_output(path: Path) -> None:
    """Finds out before the work whether :func:`write_trace` would write there; whether a file can be, others check.

    Raises:
        JobError: the ending is none of :data:`FORMATS`, or its package is not installed.
        OutputError: a folder is asked for, which cannot be made or holds something else.
    """
    suffix = check_format(path)
    if suffix == ".kineto":
        check_folder(path)
    elif suffix == ".parquet":
        arrow()
    elif suffix in (".pb", ".pb.gz", ".pftrace"):
        messages()


def write_trace(trace: Trace, path: str | Path, *, kernels: bool = False) -> None:
    """Writes a trace in the format that the name of the file ends in.

    Args:
        trace: what to write.
        path: the file; a folder for ``.kineto``.
        kernels: also write the kernels (``.kineto`` always has them).

    Raises:
        JobError: another ending, or the format needs a package that is not installed.
        OutputError: the file cannot be written.
    """
    _WRITERS[check_format(path)](trace, Path(path), kernels)
