"""Job files: YAML and single changes to a :class:`~simpar.job.Job`, and every mistake as a line that names its field.

A job file is a mapping with these sections, of which the last two may be left out::

    model: llama3-70b            # a preset, the path of a config.json (relative to this file), mlp:784-500-10,
                                 # a mapping of Transformer fields, or {base: llama3-70b, layers: 40}
    cluster: h100-sxm:64x8       # device:nodesxGPUs[@fabric], a preset, a mapping of Cluster fields,
                                 # or {base: h100-sxm:64x8, fabric: {nic_gbps: 800}}
    plan: {tp: 8, pp: 4}         # fields of Plan; what is left out has its default
    faults: {slow_gpus: {3: 0.8}}  # fields of Faults

What a value means is decided in :mod:`simpar.job` and below it; here are files, overrides and the wording of errors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from simpar.errors import ClusterError, FieldPath, JobError, ModelError, PlanError, SimparError
from simpar.job import Job
from simpar.model.presets import preset_names
from simpar.plan.layout import Layout, lay_out
from simpar.plan.plan import Plan
from simpar.reading import SafeLoader
from simpar.simulation import check_size
from simpar.units import MB

Override = tuple[tuple[str, ...], Any]
"""Where to put a value in a job, such as ``(("plan", "tp"), 8)``."""

SECTIONS = ("model", "cluster", "plan", "faults")
COMMAND_LINE = "command line"

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_BOOL, _STR = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
_LARGEST_FILE = 10 * MB
_MOST_VALUES = 1_000_000  # of a job file, its aliases written out
_PLAN_WORDS = {"global batch ": "global_batch", "layer split ": "layer_split"}


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """The job that a YAML file describes.

    Args:
        path: the file.
        overrides: values by dotted path that replace those of the file, such as ``{"plan.tp": 4}``.

    Raises:
        JobError: the file cannot be read, or a field of it is wrong; one line per mistake, each with file and field.
    """
    changes = [(tuple(where.split(".")), value) for where, value in (overrides or {}).items()]
    return read_draft(Path(path), changes).job()


def parse_change(text: str) -> Override:
    """Reads ``plan.tp=4``; the value is typed as YAML types it.

    >>> parse_change("plan.layer_split=[20, 20]")
    (('plan', 'layer_split'), [20, 20])

    Raises:
        JobError: it is no path with a value, or the path starts with no section.
    """
    where, equals, value = text.partition("=")
    path = tuple(part.strip() for part in where.split("."))
    if not equals or not all(re.fullmatch(r"[A-Za-z_][\w-]*", part) for part in path):
        raise JobError(f"--set '{text}': is not a field and its value; write it as in --set plan.tp=4")
    if path[0] not in SECTIONS:
        fields = {f"plan.{name}" for name in Plan.model_fields}
        mend = f"did you mean 'plan.{path[0]}'?" if f"plan.{path[0]}" in fields else "start with plan, model or cluster"
        raise JobError(f"--set '{text}': '{path[0]}' is not a section of a job; {mend}")
    try:
        return path, _load(value)
    except yaml.YAMLError as error:
        raise JobError(f"--set '{text}': '{value}' is not YAML ({_what(error)}); quote it") from None
    except (RecursionError, ValueError) as error:  # nested beyond reason; a date such as 2024-13-45
        raise JobError(f"--set '{where}': its value cannot be understood ({error}); quote it or nest less") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A job as written, before it is checked.

    Attributes:
        fields: the sections.
        file: name of the file, or None if there is none.
        overridden: paths that the command line gave.
    """

    fields: Mapping[str, Any]
    file: str | None = None
    overridden: frozenset[FieldPath] = frozenset()

    @property
    def source(self) -> str:
        """Where the job comes from, as messages call it."""
        return self.file or COMMAND_LINE

    def job(self) -> Job:
        """The checked job.

        Raises:
            JobError: one line per mistake.
        """
        missing = [name for name in ("model", "cluster") if self.fields.get(name) is None]
        if missing:
            forms = " and ".join(
                {"model": "model: llama3-70b", "cluster": "cluster: h100-sxm:64x8"}[m] for m in missing
            )
            flags = " and ".join(f"--{name}" for name in missing)
            raise JobError(
                f"{self._source(())}: {' and '.join(missing)}: missing; write such as {forms}, or give {flags}"
            )
        try:
            return Job.model_validate(self.fields)
        except SimparError as error:
            raise self.explain(error) from None

    def lay_out(self, job: Job) -> Layout:
        """The plan laid over model and cluster, checked to be of a size that can be simulated.

        Raises:
            JobError: the rule that the plan breaks.
        """
        try:
            job.cluster.device.gemm_fit(job.plan.precision or "bf16")
        except ClusterError as error:
            raise JobError(self._line(("plan", "precision"), str(error))) from None
        try:
            layout = lay_out(job.plan, job.model, job.cluster)
            check_size(job, layout)
        except (ModelError, PlanError) as error:
            raise self.explain(error) from None
        return layout

    def explain(self, error: SimparError) -> JobError:
        """An error with its file and the fields that it names; a plan's error may begin with the name of one."""
        path: FieldPath = ("plan",) if isinstance(error, PlanError) else ()
        found = error.problems or ((path, str(error)),)
        return JobError("\n".join(self._line(path, text) for path, text in found))

    def _line(self, path: FieldPath, text: str) -> str:
        path, text = _locate(path, text)
        field = ".".join(map(str, path))
        return f"{self._source(path)}: {field}: {text}" if field else f"{self._source(path)}: {text}"

    def _source(self, path: FieldPath) -> str:
        if self.file is None or any(path[: len(given)] == given for given in self.overridden):
            return COMMAND_LINE
        return self.file


def read_draft(path: Path | None, overrides: Iterable[Override] = ()) -> Draft:
    """Reads a job file and puts the overrides into it, the later ones over the earlier ones.

    Raises:
        JobError: the file cannot be read or holds no mapping, or an override has no place.
    """
    fields: dict[str, Any] = {} if path is None else _read(path)
    given = []
    for where, value in overrides:
        fields = _put(fields, where, value)
        given.append(where)
    if fields.get("plan", {}) is None:  # `plan:` with nothing below it
        del fields["plan"]
    return Draft(fields=fields, file=None if path is None else str(path), overridden=frozenset(given))


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_dir() and (not path.is_file() or path.stat().st_size > _LARGEST_FILE):
            raise JobError(
                f"{path}: is no file of at most {_LARGEST_FILE:,} bytes; give the path of a job file in YAML"
            )
        text = path.read_text(encoding="utf-8")
    except RuntimeError as error:
        raise JobError(f"{path}: cannot be read ({error}); give the path of a job file in YAML") from None
    except IsADirectoryError:
        raise JobError(f"{path}: is a folder, not a job file; name a YAML file in it") from None
    except FileNotFoundError:
        raise JobError(f"{path}: there is no such file; give the path of a job file in YAML") from None
    except UnicodeDecodeError:
        raise JobError(f"{path}: is not text in UTF-8; give a job file in YAML") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror}); give the path of a job file in YAML") from None
    try:
        data = _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise JobError(f"{path}: {where}is not valid YAML: {_what(error)}") from None
    except (RecursionError, ValueError) as error:  # nested beyond reason; a date such as 2024-13-45
        raise JobError(f"{path}: cannot be understood as YAML ({error}); quote the value or nest less") from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds a {_kind(data)}"
        raise JobError(f"{path}: {what}, but a job is a mapping with the sections {', '.join(SECTIONS)}")
    if "model" in data:
        data["model"] = _beside(data["model"], path.parent)
    if "cluster" in data:
        data["cluster"] = _profile_beside(data["cluster"], path.parent)
    if "plan" in data:
        data["plan"] = _schedule_beside(data["plan"], path.parent)
    return data


def _load(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: it is no YAML.
        ValueError: a value is none (a date such as 2024-13-45), or its aliases hold themselves or too much.
        RecursionError: it nests beyond reason.
    """
    data = yaml.load(text, Loader=_Loader)
    if _written_out(data, {}) > max(_MOST_VALUES, len(text)):  # without aliases every value has a character
        raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    return data


def _written_out(value: Any, known: dict[int, int]) -> int:
    """Values that a value is made of, itself included; ``known`` has those of the lists and mappings met so far.

    Raises:
        ValueError: a list or mapping holds itself.
    """
    if not isinstance(value, (dict, list)):
        return 1
    count = known.get(id(value))
    if count is None:
        known[id(value)] = -1  # until it is counted
        count = 1 + sum(_written_out(each, known) for each in (value.values() if isinstance(value, dict) else value))
        known[id(value)] = count
    if count < 0:
        raise ValueError("an alias stands inside of what it stands for")
    return count


class _Loader(SafeLoader):  # type: ignore[misc]  # one of two bases
    """YAML whose mappings name each key once (a second ``tp`` would win in silence), with numbers as in YAML 1.2.

    By YAML 1.1, which PyYAML reads, ``1:30`` is 90 (base 60), ``010`` is 8, ``1e3`` is a text, and the key ``on`` is
    true.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.tag == _BOOL:
                    key.tag = _STR
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' stands here a second time; keep one", key.start_mark
                    )
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 10 if text.lstrip("+-").isdecimal() else 0)


_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in {_INT, _FLOAT}]
    for first, found in SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?(?:\.[0-9_]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _what(error: yaml.YAMLError) -> str:
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    return str(said)


def _beside(model: Any, folder: Path) -> Any:
    """The model with a relative path made relative to the folder of the job file."""
    if isinstance(model, dict) and "base" in model:
        return {**model, "base": _beside(model["base"], folder)}
    if not isinstance(model, str) or not model or model.lower() in preset_names() or model.startswith("mlp:"):
        return model
    path = folder / Path(model).expanduser()
    return str(path) if path.exists() or path.suffix == ".json" else model


def _profile_beside(cluster: Any, folder: Path) -> Any:
    """The cluster with a profile's relative path (``profile.json:1x8``) made relative to the folder of the job file."""
    if isinstance(cluster, dict):
        return {
            **cluster,
            **{key: _profile_beside(cluster[key], folder) for key in ("base", "profile") if key in cluster},
        }
    if not isinstance(cluster, str) or ".json" not in cluster:
        return cluster
    name, suffix, shape = cluster.partition(".json")
    return f"{folder / Path(name).expanduser()}{suffix}{shape}"


def _schedule_beside(plan: Any, folder: Path) -> Any:
    """The plan with the relative path of a schedule (``mine.csv``) made relative to the folder of the job file."""
    schedule = plan.get("schedule") if isinstance(plan, dict) else None
    if not isinstance(schedule, str) or not schedule.endswith(".csv"):
        return plan
    return {**plan, "schedule": str(folder / Path(schedule).expanduser())}


def _put(fields: Mapping[str, Any], where: tuple[str, ...], value: Any, above: str = "") -> dict[str, Any]:
    """A copy of ``fields``, which lie at ``above``, with ``value`` at ``where``.

    A name on the way (``model: llama3-70b``, ``fabric: ndr400``) becomes ``{base: name}``, of which one field changes.
    So does a cluster's part that is not written down, since it follows from the rest of the cluster.
    """
    key, *rest = where
    if not rest:
        return {**fields, key: value}
    inner = fields.get(key)
    if isinstance(inner, str):
        inner = {"base": inner}
    elif inner is None:
        inner = {}
    elif not isinstance(inner, Mapping):
        field = above + ".".join(where)
        raise JobError(f"{COMMAND_LINE}: {field}: {above}{key} is a {_kind(inner)}, which has no fields; set it whole")
    elif key == "cluster" and len(rest) > 1 and "base" not in inner and rest[0] not in inner:
        inner = {"base": dict(inner)}
    return {**fields, key: _put(inner, tuple(rest), value, f"{above}{key}.")}


def _kind(value: Any) -> str:
    return {list: "list", str: "text", dict: "mapping", bool: "truth value"}.get(type(value), "number")


def _locate(path: FieldPath, text: str) -> tuple[FieldPath, str]:
    """Moves a field's name from the start of a plan's error into the path: errors of a plan begin with it."""
    if path != ("plan",):
        return path, text
    for words, field in _PLAN_WORDS.items():
        if text.startswith(words):
            return ("plan", field), text.removeprefix(words)
    first, _, rest = text.partition(" ")
    return (("plan", first), rest) if first in Plan.model_fields else (path, text)
