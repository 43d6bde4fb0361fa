"""The space of plans: what each field may be, given those before it.

A field of :class:`~simpar.plan.plan.Plan` joins the search with one line in ``AXES``. Plans come in families: those of
a family differ only in how layers are spread over stages, ordered, recomputed and sharded, so that they are made of the
same kernels and collectives.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from simpar.hardware.cluster import Cluster
from simpar.model.transformer import Transformer
from simpar.plan.layout import Model, sequence_length
from simpar.plan.plan import Plan
from simpar.plan.sync import worker_gpus
from simpar.schedule.registry import takes

Fields = dict[str, Any]


class Setting(NamedTuple):
    """What a choice may depend on: the job, and the fields chosen so far."""

    model: Model
    cluster: Cluster
    base: Plan
    fields: Fields

    def get(self, name: str) -> Any:
        """A field as chosen so far, or of all plans."""
        return self.fields[name] if name in self.fields else getattr(self.base, name)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.model.layers if isinstance(self.model, Transformer) else len(self.model.layers)

    @property
    def most_stages(self) -> int:
        """Virtual stages at most: each holds a layer, or the embedding or the head of a transformer alone."""
        return self.layers + (2 if self.transformer is not None else 0)

    @property
    def transformer(self) -> Transformer | None:
        """The model, if it can be split inside a layer."""
        return self.model if isinstance(self.model, Transformer) else None

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        assert self.base.global_batch is not None, "a search keeps the batch"
        return self.base.global_batch

    @property
    def gpus(self) -> int:
        """Those that train: servers on nodes of their own take no part in any degree."""
        return worker_gpus(self.base, self.cluster)

    @property
    def left(self) -> int:
        """GPUs per group that splits a layer: what is left for stages and replicas; 0 if the degrees do not divide."""
        taken = self.get("tp") * self.get("cp")
        return 0 if self.gpus % taken else self.gpus // taken

    def replicas(self, pp: int) -> int:
        """Data-parallel degree with so many stages."""
        return self.left // pp


Choice = Callable[[Setting], Iterable[Any]]


def divisors(number: int) -> list[int]:
    """All divisors, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0] if number > 0 else []


def _tensor_degrees(setting: Setting) -> Iterable[int]:
    model = setting.transformer
    return (1,) if model is None else [tp for tp in divisors(setting.gpus) if model.heads % tp == 0]


def _context_degrees(setting: Setting) -> Iterable[int]:
    """Those that cut a sequence into even pairs of pieces, and leave each rank heads where it trades for them."""
    if setting.transformer is None:
        return (1,)
    seq_len = sequence_length(setting.base, setting.transformer)
    heads = setting.transformer.heads // setting.get("tp")
    trades = setting.base.cp_method == "all_to_all" and "cp_method" not in setting.fields
    found = [cp for cp in divisors(setting.left) if cp == 1 or seq_len % (2 * cp) == 0]
    return [cp for cp in found if not trades or heads % cp == 0]


def _expert_degrees(setting: Setting) -> Iterable[int]:
    moe = setting.transformer.moe if setting.transformer is not None else None
    return (1,) if moe is None else [ep for ep in divisors(moe.experts) if setting.gpus % ep == 0]


def _expert_tensor_degrees(setting: Setting) -> Iterable[int | None]:
    """Whole experts, or experts split like everything else."""
    if setting.transformer is None or setting.transformer.moe is None:
        return (None,)
    return (1, setting.get("tp")) if setting.get("tp") > 1 else (1,)


def _micro_batches(setting: Setting) -> Iterable[int]:
    """Those that some number of stages leaves room for."""
    return [n for n in divisors(setting.global_batch) if any(_stages(setting, n))]


def _sequence_parallel(setting: Setting) -> Iterable[bool]:
    tp, etp = setting.get("tp"), setting.get("etp")
    if tp == 1:
        return (False,)
    # tensor-parallel ranks that hold the same tokens cannot each bring them to experts of another split
    return (True,) if etp not in (None, tp) else (False, True)


def _stages(setting: Setting, micro_batch: int) -> list[int]:
    """Pipeline degrees whose replicas share the batch, and whose stages hold all experts."""
    spread = setting.get("ep") * (setting.get("etp") or setting.get("tp"))
    return [
        pp
        for pp in divisors(setting.left)
        if pp <= setting.most_stages
        and setting.global_batch % (setting.replicas(pp) * micro_batch) == 0
        and (setting.get("ep") == 1 or setting.gpus // pp % spread == 0)
    ]


def _recompute(setting: Setting) -> Iterable[str]:
    return ("none", "selective", "full") if setting.transformer is not None else ("none", "full")


def _schedules(setting: Setting) -> Iterable[str]:
    """1F1B and its interleaved form, which never lose to GPipe; others are asked for by name."""
    return ("1f1b", "interleaved") if setting.get("pp") > 1 else ("1f1b",)


def _chunks(setting: Setting) -> Iterable[int]:
    if not takes(setting.get("schedule"), "chunks"):
        return (1,)
    return range(2, setting.most_stages // setting.get("pp") + 1)


def _zero_stages(setting: Setting) -> Iterable[int]:
    return (0, 1, 2, 3) if setting.replicas(setting.get("pp")) * setting.get("cp") > 1 else (0,)


AXES: Mapping[str, Choice] = MappingProxyType(
    {
        "tp": _tensor_degrees,
        "cp": _context_degrees,
        "ep": _expert_degrees,
        "etp": _expert_tensor_degrees,
        "micro_batch": _micro_batches,
        "sequence_parallel": _sequence_parallel,
        "pp": lambda s: _stages(s, s.get("micro_batch")),
        "recompute": _recompute,
        "schedule": _schedules,
        "vpp": _chunks,
        "zero": _zero_stages,
    }
)
"""The fields that are searched, in order; a search may restrict them, and add any other field of a plan."""

INNER = ("pp", "recompute", "schedule", "vpp", "zero")
"""The last of them, in which the plans of a family differ."""

SPREAD = ("ep", "etp")
"""Those that say how experts are spread; families of a branch differ in nothing else."""

# What these may be follows from other fields, so that a list restricts the choice; lists of others replace it.
_BOUND = frozenset({"micro_batch", "sequence_parallel", "pp", "vpp", "zero"})


class Pipeline(NamedTuple):
    """The plans of a family on one number of stages: every combination of what is left open.

    Attributes:
        fields: those of the family, and ``pp``.
        recompute: ways to recompute, those that run least first.
        orders: schedules and their chunks.
        zero: ZeRO stages, those that keep most first.
    """

    fields: Fields
    recompute: tuple[str, ...]
    orders: tuple[tuple[str, int], ...]
    zero: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many plans these are."""
        return len(self.recompute) * len(self.orders) * len(self.zero)

    def plans(self) -> Iterator[Fields]:
        """Their fields."""
        return (self.plan(*choice) for choice in product(self.recompute, self.orders, self.zero))

    def plan(self, recompute: str, order: tuple[str, int], zero: int) -> Fields:
        """The fields of one of them."""
        return {**self.fields, "recompute": recompute, "schedule": order[0], "vpp": order[1], "zero": zero}


def _recomputed(recompute: str) -> int:
    """How much runs again, as a place in an order."""
    return ("none", "selective", "full").index(recompute)


class Space:
    """All combinations of choices for one model on one cluster; some may yet break a rule.

    Args:
        model: the model.
        cluster: the machines.
        base: all other fields; its ``global_batch`` is set.
        choices: values of fields that replace those of ``AXES``, as :func:`~simpar.search.choices.read_choices` reads
            them.
    """

    def __init__(self, model: Model, cluster: Cluster, base: Plan, choices: Mapping[str, Iterable[Any]]) -> None:
        self._model = model
        self._cluster = cluster
        self._base = base
        self._choices = {name: list(values) for name, values in choices.items()}
        self.axes = axes_of(self._choices, model)
        self._outer = tuple(name for name in self.axes if name not in INNER)

    def families(self) -> Iterator[Fields]:
        """The fields of every family that has plans."""
        return self._extend({}, 0)

    def _extend(self, fields: Fields, number: int) -> Iterator[Fields]:
        if number == len(self._outer):
            if self._values("pp", fields):
                yield dict(fields)
            return
        name = self._outer[number]
        for value in self._values(name, fields):
            fields[name] = value
            yield from self._extend(fields, number + 1)
            del fields[name]

    def branches(self) -> Iterator[tuple[Fields, ...]]:
        """The same families, those that differ only in how experts are spread together."""
        found: dict[tuple[Any, ...], list[Fields]] = {}
        for family in self.families():
            found.setdefault(tuple(value for name, value in family.items() if name not in SPREAD), []).append(family)
        return map(tuple, found.values())

    def pipelines(self, family: Fields) -> Iterator[Pipeline]:
        """The plans of a family by their number of stages."""
        for pp in self._values("pp", family):
            fields = {**family, "pp": pp}
            recompute = sorted(self._values("recompute", fields), key=_recomputed)
            orders = [
                (schedule, vpp)
                for schedule in self._values("schedule", fields)
                for vpp in self._values("vpp", {**fields, "schedule": schedule})
            ]
            zero = sorted(self._values("zero", fields))
            if recompute and orders and zero:
                yield Pipeline(fields, tuple(recompute), tuple(orders), tuple(zero))

    def plans(self) -> Iterator[Fields]:
        """Every plan, as the fields that differ from the base; those of a family follow each other."""
        for family in self.families():
            for pipeline in self.pipelines(family):
                yield from pipeline.plans()

    def _values(self, name: str, fields: Fields) -> Sequence[Any]:
        wanted = self._choices.get(name)
        if wanted is not None and name not in _BOUND:
            # without context parallelism its methods are all the same
            return wanted[:1] if name == "cp_method" and fields.get("cp", self._base.cp) == 1 else wanted
        offered = list(AXES[name](Setting(self._model, self._cluster, self._base, fields)))
        return offered if wanted is None else [value for value in offered if value in wanted]


def axes_of(choices: Mapping[str, Iterable[Any]], model: Model) -> tuple[str, ...]:
    """The fields in which the plans of a search differ: those of families first."""
    has_experts = isinstance(model, Transformer) and model.moe is not None
    usual = [name for name in AXES if has_experts or name not in SPREAD or name in choices]
    added = [name for name in choices if name not in AXES]
    return (*(name for name in usual if name not in INNER), *added, *INNER)
