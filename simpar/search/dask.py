"""A Dask cluster as a ``concurrent.futures.Executor``."""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from simpar.errors import JobError

CONNECT_S = 10  # seconds in which a scheduler answers, if there is one


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """The workers of a Dask scheduler; they need simpar of the same version.

    Args:
        address: such as ``tcp://10.0.0.1:8786``.

    Raises:
        JobError: Dask is not installed, the address is none, or no scheduler answers.
    """
    try:
        import distributed  # noqa: PLC0415 - an extra
    except ImportError:
        raise JobError("--dask needs Dask, which is not installed; pip install 'simpar[dask]'") from None
    _check(address)
    connect: Any = distributed.Client  # has no types
    try:
        client = connect(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise JobError(
            f"--dask '{address}': no scheduler answers ({str(error).splitlines()[0] if str(error) else 'timeout'}); "
            "start one with dask scheduler, and give its address, such as tcp://10.0.0.1:8786"
        ) from None
    try:
        # calls that are alike are not the same call: a cached answer of a worker that died is no answer
        executor: Executor = client.get_executor(pure=False)
        yield executor
    finally:
        client.close()


def _check(address: str) -> None:
    """Refuses what is no address before a client is made, which waits for what cannot come, and for it again to end."""
    from distributed.comm.addressing import parse_address, parse_host_port  # noqa: PLC0415 - an extra
    from distributed.comm.registry import get_backend  # noqa: PLC0415

    try:
        scheme, place = parse_address(address)
        get_backend(scheme)
        host, port = (place, 1) if scheme == "inproc" else parse_host_port(place)  # within a process there are no ports
    except ValueError:
        host, port = "", 0
    if not host or not 0 < port < 2**16:
        raise JobError(f"--dask '{address}': is no address of a scheduler; write it as in tcp://10.0.0.1:8786")
