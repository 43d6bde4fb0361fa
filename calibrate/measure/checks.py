"""What is checked before anything is measured: files, devices, back ends."""

import json
import os
from pathlib import Path

from calibrate.detect import Machine
from calibrate.errors import MeasurementError
from calibrate.lines import FORMAT
from calibrate.measure.timer import check_cores, check_devices


def check_output(out: Path, raw: Path, *, resume: bool) -> None:
    """Finds out before the work whether its files can be written, and whether nothing of another kind is there.

    Raises:
        MeasurementError: one sentence on what is in the way.
    """
    folder = out.parent
    if not folder.is_dir():
        problem = f"there is no folder '{folder}'; create it first"
    elif out.is_dir():
        problem = "it is a folder; add a file name"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"there is no permission to write into '{folder}'; choose another place"
    elif out.exists() and not _is_profile(out):
        problem = "it exists and is no profile of simpar; choose another name"
    elif raw.exists() and not (raw.is_file() and os.access(raw, os.W_OK)):
        problem = f"'{raw}' beside it cannot be written; choose another name"
    elif raw.exists() and not _is_journal(raw):
        problem = f"'{raw}' beside it exists and holds no measurements of simpar; choose another name"
    elif resume and not raw.exists():
        raise MeasurementError(f"--resume: there is no '{raw}' to go on with; leave --resume out")
    elif raw.exists() and not resume and not out.exists():
        raise MeasurementError(
            f"'{raw}' holds the measurements of a run that did not finish; go on with --resume, or delete it"
        )
    else:
        return
    raise MeasurementError(f"--out: cannot write '{out}': {problem}")


def check_ranks(machine: Machine, ranks: int, *, cuda: bool, nccl: bool) -> None:
    """Raises MeasurementError if the machine has too few devices for the ranks, or its torch no NCCL."""
    if not cuda:
        check_cores(ranks, machine.cores)
        return
    check_devices(ranks, len(machine.gpus))
    if ranks > 1 and not nccl:
        raise MeasurementError(
            f"{ranks} GPUs communicate through NCCL, which this torch lacks; install a build with NCCL, or measure one "
            "GPU with --ranks 1"
        )


def _is_profile(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"schema_version", "device"} <= data.keys()


def _is_journal(path: Path) -> bool:
    with path.open("rb") as file:
        return f'"{FORMAT}"'.encode() in file.readline(1000)
