"""The fields of the live page: from texts and numbers to a job, its result, messages beside fields, and an address.

No web framework is needed here; :mod:`simpar.view.app` draws it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

import yaml

from simpar.errors import JobError, PlanError, SimparError
from simpar.hardware.cluster import Cluster
from simpar.job import Job
from simpar.plan.layout import lay_out
from simpar.plan.plan import Plan
from simpar.result import Result
from simpar.simulation import simulate

Values = Mapping[str, Any]
"""What the fields hold, by name; numbers may be None while somebody types."""

NUMBERS = ("tp", "pp", "cp", "vpp", "micro_batch", "global_batch", "seq_len", "nic_gbps")
DEFAULTS: dict[str, Any] = {
    "model": "llama3-70b",
    "cluster": "h100-sxm:16x8",
    "nic_gbps": None,
    "tp": 8,
    "pp": 4,
    "cp": 1,
    "vpp": 1,
    "schedule": "1f1b",
    "zero": 1,
    "sequence_parallel": True,
    "recompute": "none",
    "micro_batch": 1,
    "global_batch": 128,
    "seq_len": 8192,
}
"""Every field and what it holds at first."""

_PLAN = tuple(name for name in DEFAULTS if name not in ("model", "cluster", "nic_gbps"))
_MAY_BE_EMPTY = ("nic_gbps", "seq_len", "global_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the fields lead to.

    Attributes:
        result: the simulated step; None if there is a mistake.
        errors: sentences by name of the field that they belong to, ``""`` where that is not known.
    """

    result: Result | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


def job_fields(values: Values) -> dict[str, Any]:
    """The sections of a job, without what is as by default."""
    cluster: Any = values["cluster"]
    if values.get("nic_gbps") is not None:
        cluster = {"base": cluster, "fabric": {"nic_gbps": values["nic_gbps"]}}
    quiet = {name: info.default for name, info in Plan.model_fields.items()}
    plan = {name: values[name] for name in _PLAN if values.get(name) is not None and values[name] != quiet.get(name)}
    return {"model": values["model"], "cluster": cluster, "plan": plan}


def own_nic_gbps(cluster: Any) -> float | None:
    """The speed that a cluster's NICs have if nothing else is asked for; None without a network, or a name of one.

    >>> own_nic_gbps("h100-sxm:16x8"), own_nic_gbps("h100-sxm:8"), own_nic_gbps("h1")
    (400.0, None, None)
    """
    try:
        read = Cluster.parse(str(cluster))
    except SimparError:
        return None
    return read.fabric.nic_gbps if read.fabric is not None and read.nodes > 1 else None


def to_yaml(values: Values) -> str:
    """A job file.

    >>> print(to_yaml({**DEFAULTS, "nic_gbps": 800, "tp": 4}).splitlines()[4])
        nic_gbps: 800
    """
    text: str = yaml.safe_dump(job_fields(values), sort_keys=False, allow_unicode=True)
    return text


def outcome(values: Values) -> Outcome:
    """Simulates what the fields say; never raises for what people type."""
    return _outcome(tuple((name, values.get(name)) for name in DEFAULTS))


@lru_cache(maxsize=64)
def _outcome(items: tuple[tuple[str, Any], ...]) -> Outcome:
    values = dict(items)
    missing = [
        name for name in (*NUMBERS, "model", "cluster") if values[name] in (None, "") and name not in _MAY_BE_EMPTY
    ]
    if missing:
        return Outcome(errors=dict.fromkeys(missing, "is empty; give a value"))
    try:
        job = Job.model_validate(job_fields(values))
        lay_out(job.plan, job.model, job.cluster)
        return Outcome(result=simulate(job, allow_oom=True))
    except SimparError as error:
        found = error.problems or ((("plan",) if isinstance(error, PlanError) else (), str(error)),)
        errors: dict[str, str] = {}
        for path, text in found:
            errors.setdefault(_field(path, text), _short(text))
        return Outcome(errors=errors)
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        return Outcome(errors={"": f"{type(error).__name__}: {error}"})


def _field(path: tuple[Any, ...], text: str) -> str:
    """The field that an error is about: named by its path, or by the first name in its text."""
    names = [str(part) for part in path]
    if names and names[-1] in DEFAULTS and names[0] == "plan":
        return names[-1]
    if names and names[0] in ("model", "cluster"):
        return "nic_gbps" if "nic_gbps" in (*names, *text.split()[:1]) else names[0]
    words = text.replace("=", " ").replace(",", " ").replace("'", " ").split()
    return next((word for word in words if word in DEFAULTS), "")


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "…"


# ---- addresses ------------------------------------------------------------------------------------------------------


def to_query(values: Values, kept: Values | None = None, view: str = "") -> str:
    """What stands behind the question mark of an address that opens the page like this.

    >>> to_query({**DEFAULTS, "tp": 4})
    '?tp=4'
    """
    pairs = _pairs(values)
    if kept is not None:
        pairs.append(("a", urlencode(_pairs(kept))))
    if view:
        pairs.append(("view", view))
    return f"?{urlencode(pairs)}" if pairs else ""


def _pairs(values: Values) -> list[tuple[str, str]]:
    changed = [name for name in DEFAULTS if values.get(name) != DEFAULTS[name]]
    return [(name, "" if values.get(name) is None else str(values[name])) for name in changed]


def from_query(query: str) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Fields, those of the plan that was kept, and the view, of an address; what cannot be read is as by default."""
    given = dict(parse_qsl(query.removeprefix("?"), keep_blank_values=True))
    kept = _read(dict(parse_qsl(given["a"], keep_blank_values=True))) if "a" in given else None
    return _read(given), kept, given.get("view", "")


def _read(given: Mapping[str, str]) -> dict[str, Any]:
    values = dict(DEFAULTS)
    for name, text in given.items():
        if name in DEFAULTS:
            values[name] = _value(name, text)
    return values


def _value(name: str, text: str) -> Any:
    if name == "sequence_parallel":
        return text == "True"
    if name not in (*NUMBERS, "zero"):
        return text
    if not text:
        return None
    try:
        number = float(text)
        return int(number) if number == int(number) else number
    except (ValueError, OverflowError):
        return DEFAULTS[name]


def from_job(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the page of a job file's sections.

    Raises:
        JobError: the cluster is more than a name and the speed of its NICs, or the plan has fields that the page lacks.
    """
    values = dict(DEFAULTS)
    plan = dict(fields.get("plan") or {})
    unknown = [name for name in plan if name not in _PLAN]
    if unknown:
        raise JobError(f"simpar app: the page has no field for {', '.join(unknown)}; leave it out of the job file")
    values |= {
        name: None if name in _MAY_BE_EMPTY else info.default
        for name, info in Plan.model_fields.items()
        if name in _PLAN
    }
    values |= plan
    cluster = fields.get("cluster", values["cluster"])
    if isinstance(cluster, Mapping):
        fabric = cluster.get("fabric")
        plain = set(cluster) <= {"base", "fabric"} and isinstance(fabric, Mapping) and set(fabric) == {"nic_gbps"}
        if not plain or not isinstance(cluster.get("base"), str):
            raise JobError(
                "simpar app: the page knows clusters by name, such as h100-sxm:16x8; name one in the job file"
            )
        assert isinstance(fabric, Mapping)
        values |= {"cluster": cluster["base"], "nic_gbps": fabric["nic_gbps"]}
    else:
        values["cluster"] = cluster
    model = fields.get("model", values["model"])
    if not isinstance(model, str):
        raise JobError(
            "simpar app: the page knows models by name or by the path of a config.json; name one in the job file"
        )
    values["model"] = model
    return values
