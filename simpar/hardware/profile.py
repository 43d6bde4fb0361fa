"""Profiles: a machine's fitted device and links with uncertainty, errors and provenance, as one readable JSON file.

``calibrate`` writes them; a cluster is made of one by :meth:`simpar.hardware.cluster.Cluster.parse` of
``profile.json:1x8``. The catalog's measured devices take their fits from profiles in ``catalog/profiles``.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from simpar.description import Description
from simpar.errors import ClusterError, SimparError
from simpar.hardware.cluster import Fabric, NodeLink
from simpar.hardware.device import Device
from simpar.reading import read_json, read_text

SCHEMA_VERSION = 1
"""The version of the file format that this simpar reads and writes."""

NonNegative = Annotated[float, Field(ge=0)]


class Accuracy(Description):
    """Relative errors |predicted/measured - 1| of one class of kernels or collectives in one region.

    Attributes:
        what: class, such as ``gemm.bf16``, ``attention.128`` or ``collective.all_reduce``.
        region: ``training`` (products: m >= 1,024 and more than 20 µs), ``decode`` (m <= 256), ``large``, ``all``.
        split: ``fitted``, or what was held out of the fit that is judged here.
        count: measurements judged.
        mean: of the errors.
        median: of the errors.
        p90: 90th percentile of the errors.
        bias: median of log(predicted/measured); positive if predictions are too slow.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    what: str
    region: str
    split: str
    count: Annotated[int, Field(ge=1)]
    mean: NonNegative
    median: NonNegative
    p90: NonNegative
    bias: float


class Provenance(Description):
    """How a profile came about.

    Attributes:
        command: what made it.
        date: day of the fit, ISO 8601.
        host: machine that was measured, or an empty string.
        versions: of what measured and fitted.
        files: measurement files by name, with the number of measurements that the fit took from each.
        facts: what the measurements say of themselves.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    command: str = ""
    date: str = ""
    host: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)
    facts: dict[str, str] = Field(default_factory=dict)


class Profile(Description):
    """What calibration knows of a machine.

    Attributes:
        schema_version: of the file format.
        name: name of the profile.
        device: its accelerator, with the fits, their errors and sources.
        node_link: the path between the accelerators of a node; None if nothing is known of it.
        fabric: the network between nodes; None if nothing is known of it.
        uncertainty: relative standard deviation of each fitted parameter by dotted path, such as
            ``device.gemm.bf16.peak_efficiency``. From one stack it is that of the machine that was measured; by how
            much others of its kind differ is ``device.errors["level"]``.
        accuracy: errors by class, region and split.
        notes: what was not measured, left out or striking, one sentence each.
        provenance: how it came about.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    schema_version: int = SCHEMA_VERSION
    name: str = Field(min_length=1)
    device: Device
    node_link: NodeLink | None = None
    fabric: Fabric | None = None
    uncertainty: dict[str, NonNegative] = Field(default_factory=dict)
    accuracy: tuple[Accuracy, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: Provenance = Provenance()

    def to_json(self) -> str:
        """The file's text: fields as declared, free mappings sorted, indented; equal for equal profiles."""
        return json.dumps(_sorted(self.model_dump(mode="json")), indent=1, ensure_ascii=False) + "\n"

    def write(self, path: str | Path) -> None:
        """Writes the file, complete or not at all.

        Raises:
            ClusterError: the file cannot be written there.
        """
        target = Path(path)
        try:
            handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        except OSError as error:
            raise ClusterError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            Path(draft).chmod(0o644)  # mkstemp lets only the owner read
            Path(draft).replace(target)
        except OSError as error:
            raise ClusterError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
        finally:
            Path(draft).unlink(missing_ok=True)


_FREE = ("errors", "sources", "uncertainty", "versions", "files", "facts")  # mappings whose keys are no fields


def _sorted(data: dict[str, Any]) -> dict[str, Any]:
    ordered = {}
    for key, value in data.items():
        if isinstance(value, dict):
            ordered[key] = dict(sorted(value.items())) if key in _FREE else _sorted(value)
        else:
            ordered[key] = value
    return ordered


def load_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ClusterError: the file cannot be read, is of another schema version or describes no profile; the message names
            file and field.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ClusterError(
            f"{path}: cannot be read ({error.strerror}); give the path of a profile that simpar calibrate wrote"
        ) from None
    return parse_profile(text, str(path))


def parse_profile(text: str, origin: str) -> Profile:
    """The profile in a file's text; ``origin`` names the file in messages.

    Raises:
        ClusterError: see :func:`load_profile`.
    """
    try:
        data = read_json(text)
    except ValueError as error:
        raise ClusterError(f"{origin}: {error}; give a profile that simpar calibrate wrote") from None
    if not isinstance(data, dict) or "device" not in data:
        raise ClusterError(f"{origin}: is no profile; give one that simpar calibrate wrote")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ClusterError(
            f"{origin}: has schema_version {version}, but this simpar reads {SCHEMA_VERSION}; "
            f"calibrate again, or install the simpar that wrote it"
        )
    try:
        return Profile.model_validate(data)
    except SimparError as error:
        raise ClusterError(f"{origin}: {error}") from None
