"""What a detected device has instead of the catalog's rates, as plain values that measurements carry along.

A CPU has no datasheet: its peak follows from the cores and vector units that were found. Whoever fits the measurements
later, elsewhere, needs the same rates, since all efficiencies relate to them.
"""

from collections.abc import Mapping
from typing import Any

from calibrate.errors import MeasurementError
from simpar.errors import SimparError
from simpar.hardware.device import Device, device

FIELDS = ("title", "peak_flop_per_s", "memory_bytes", "memory_bytes_per_s", "sms")
"""Fields of a device that may differ; beside them there are ``name`` (the catalog's) and ``sources``."""


def datasheet_of(measured: Device) -> dict[str, Any]:
    """The fields in which a device differs from the catalog's one of its name.

    >>> datasheet_of(device("cpu").replace(sms=1))
    {'name': 'cpu', 'sms': 1, 'sources': {'sms': 'assumed: cores'}}
    """
    catalog = device(measured.name)
    changed = [name for name in FIELDS if getattr(measured, name) != getattr(catalog, name)]
    found = {"name": measured.name, **measured.model_dump(mode="json", include=set(changed))}
    sources = {name: measured.sources[name] for name in changed if name in measured.sources}
    return {**found, "sources": sources} if sources else found


def with_datasheet(catalog: Device, datasheet: Mapping[str, Any]) -> Device:
    """The catalog's device with the rates that the measured one has.

    Raises:
        MeasurementError: the measurements are of another device, or their datasheet is none.
    """
    if not datasheet:
        return catalog
    if datasheet["name"] != catalog.name:
        raise MeasurementError(
            f"the measurements are of device '{datasheet['name']}', not of '{catalog.name}'; fit them with --device "
            f"{datasheet['name']}, or name it with --base"
        )
    changed = {name: value for name, value in datasheet.items() if name in FIELDS}
    try:
        return catalog.replace(**changed, sources={**catalog.sources, **datasheet.get("sources", {})})
    except SimparError as error:
        raise MeasurementError(f"the datasheet in the measurements is none: {error}; measure again") from None
