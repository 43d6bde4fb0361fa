"""The other side of :mod:`calibrate.processes`: how a started process lives, hears orders, and tells how they went."""

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

from simpar.errors import SimparError

Answer = tuple[Any, ...]
"""The kind of an answer first; ``("error", text, whether the text is a sentence for users)`` after a failure."""


def begin(folder: Path | None = None) -> None:
    """Leaves Ctrl-C to the parent, and ends with it; then ``folder`` is removed in its stead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, args=(folder,), daemon=True).start()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine


def orders(connection: Connection, folder: Path) -> Iterator[bytes]:
    """What the parent asks for, until it has nothing more to ask or is gone."""
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the parent is gone
            shutil.rmtree(folder, ignore_errors=True)
            return
        if not message:
            return
        yield message


def answer_of(work: Callable[[], Answer]) -> Answer:
    """What the work answers; whatever goes wrong, the parent must hear of it."""
    try:
        return work()
    except SimparError as error:
        return ("error", str(error), True)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().split("\n")[0]
        return ("error", f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})", False)


def join(store: str, rank: int, size: int, timeout_s: float, *, backend: str = "gloo") -> None:
    """Joins the process group of this machine's processes."""
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def _die_with_parent(folder: Path | None) -> None:
    """Ends the process when its parent is gone, whatever it hangs in."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
