"""The host of a node: its processor, its memory, and the links to the node's GPUs; a description only."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from simpar.description import Description
from simpar.errors import ClusterError, SimparError
from simpar.hardware.device import Device, device


def read_device(value: Any) -> Any:
    """A device given as a name of the catalog, or as a mapping with such a name as ``base``; others are left as is."""
    if isinstance(value, str):
        return device(value)
    if isinstance(value, Mapping) and "base" in value:
        return device(str(value["base"])).replace(**{k: v for k, v in value.items() if k != "base"})
    return value


class Host(Description):
    """The processor of a node: a place where a program may run (a parameter server), or keep what devices need less.

    Attributes:
        about: one line for people.
        device: the processor with its memory, as a name of the catalog or fields with a ``base``.
        link_bytes_per_s: usable rate of one link to the GPUs, one direction. The default is PCIe 4.0 with 16 lanes,
            which carries 31.5 GB/s on the wire and some 25 GB/s of copies.
        gpus_per_link: GPUs that share such a link (those below one PCIe switch).
        gpus_per_host: GPUs that share a processor and its memory; None means those of the node.
        latency_s: latency of a copy (assumed; small copies of CUDA take some 10 µs).
        sources: where the values come from.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    about: str = ""
    device: Annotated[Device, BeforeValidator(read_device)] = Field(default_factory=lambda: device("cpu"))
    link_bytes_per_s: Annotated[float, Field(gt=0)] = 25e9
    gpus_per_link: Annotated[int, Field(ge=1)] = 1
    gpus_per_host: Annotated[int, Field(ge=1)] | None = None
    latency_s: Annotated[float, Field(ge=0)] = 10e-6
    sources: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether anybody has said what the processor is, in place of the generic one."""
        return self.device != device("cpu")
