"""What is checked: each plan on networks that suit it, once as a job of the simulator and once as a recipe to train."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpar
from calibrate.training.recipe import (
    DDP_BUCKET_BYTES,
    STRATEGIES,
    Gpt,
    Perceptron,
    Recipe,
    Strategy,
    TrainingDType,
)
from simpar.errors import SimparError, nearest
from simpar.hardware.cluster import Cluster
from simpar.hardware.profile import Profile
from simpar.model.transformer import Transformer
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Model
from simpar.plan.plan import Overlap, Plan

PLANS: tuple[Strategy, ...] = STRATEGIES
"""What ``--plans`` may name; ``dp-pp`` takes four ranks or more."""

LARGE_STEP_S = 0.1
"""How long a step of the large perceptron takes, about."""

SMALL, SMALL_BATCH = Perceptron((784, 500, 10)), 64
TINY, TINY_BATCH = Gpt(layers=2, hidden=256, heads=4, vocab=1024, seq_len=128), 4
_LARGE_WIDTHS = tuple(2**n for n in range(8, 15))
_MICROBATCHES = 4
_FEWEST_RANKS = {"one": 1, "dp-pp": 4}


class CheckError(SimparError):
    """A check that cannot run here; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan on one network.

    Attributes:
        network: short name of the network.
        recipe: as a training step.
        model: as the simulator describes it.
        plan: as the simulator describes it.
    """

    network: str
    recipe: Recipe
    model: Model
    plan: Plan

    @property
    def name(self) -> str:
        """Plan, microbatches and network."""
        pieces = f" ×{self.recipe.microbatches}" if self.recipe.pipelined else ""
        return f"{self.recipe.strategy}{pieces} · {self.network}"


def chosen(plans: Sequence[str] | None, ranks: int) -> tuple[tuple[Strategy, ...], tuple[str, ...]]:
    """The plans to check and notes on those left out; all that the ranks can hold if none are named.

    Raises:
        CheckError: an unknown plan, or one that needs more ranks.
    """
    if ranks < 1:
        raise CheckError(f"{ranks} ranks can hold no plan; give --ranks 1 or more")
    found: list[Strategy] = []
    notes = []
    for name in plans or PLANS:
        known = next((plan for plan in PLANS if plan == name), None)
        if known is None:
            raise CheckError(f"unknown plan '{name}'{nearest(name, list(PLANS))}; choose of {', '.join(PLANS)}")
        fewest = _FEWEST_RANKS.get(known, 2)
        if ranks >= fewest and not (known == "dp-pp" and ranks % 2):
            found.append(known)
        elif plans:
            even = " and an even number of them" if known == "dp-pp" else ""
            raise CheckError(
                f"plan '{name}' needs at least {fewest} ranks{even}, not {ranks}; raise --ranks or leave it out"
            )
        else:
            notes.append(f"{name} was left out: it needs at least {fewest} ranks")
    return tuple(dict.fromkeys(found)), tuple(notes)


def cases(plans: Sequence[Strategy], ranks: int, profile: Profile, *, quick: bool = False) -> tuple[Case, ...]:
    """What to check of the plans: a small perceptron, one whose step takes some 100 ms, a tiny transformer.

    Args:
        plans: which.
        ranks: processes of every plan but ``one``.
        profile: of the machine; decides how large the large one is.
        quick: one network for each plan (two for ``dp``).
    """
    dtype = precision(profile)
    large = perceptron_of(profile, LARGE_STEP_S)
    return tuple(case for plan in plans for case in _of_plan(plan, ranks, large, dtype, quick))


def precision(profile: Profile) -> TrainingDType:
    """bf16 where products have hardware of their own for it, else fp32."""
    peaks = profile.device.peak_flop_per_s
    return "bf16" if peaks.get("bf16", 0.0) > 2 * peaks.get("fp32", 0.0) else "fp32"


def perceptron_of(profile: Profile, step_s: float) -> tuple[Perceptron, int]:
    """Four layers so wide that a step of one device is predicted to take nearest to ``step_s``; its batch."""
    dtype = precision(profile)

    def distance(width: int) -> float:
        case = _case("one", 1, *_large(width), dtype)
        predicted = simpar.simulate(job(case, profile), allow_oom=True).step_time_s
        return max(predicted / step_s, step_s / predicted)

    network, batch = _large(min(_LARGE_WIDTHS, key=distance))
    return network, batch


def _large(width: int) -> tuple[Perceptron, int]:
    return Perceptron((width, 2 * width, width, 2 * width, width)), max(8, width // 8)


def _of_plan(
    plan: Strategy, ranks: int, large: tuple[Perceptron, int], dtype: TrainingDType, quick: bool
) -> Iterator[Case]:
    deep = ranks <= TINY.layers or plan not in ("gpipe", "1f1b")
    networks: list[tuple[Perceptron | Gpt, int]] = []
    if plan in ("one", "dp"):
        networks.append((SMALL, SMALL_BATCH))
    if plan != "tp" and (ranks <= len(large[0].widths) - 1 or plan not in ("gpipe", "1f1b")):
        networks.append(large)
    if deep and (plan != "tp" or not TINY.heads % ranks):
        networks.append((TINY, TINY_BATCH))
    if quick:
        networks = networks[:2] if plan == "dp" else networks[-1:] if plan == "tp" else networks[:1]
        networks = [large] if plan == "one" else networks
    for network, batch in networks:
        yield _case(plan, 1 if plan == "one" else ranks, network, batch, dtype)


def _case(plan: Strategy, ranks: int, network: Perceptron | Gpt, batch: int, dtype: TrainingDType) -> Case:
    pipelined = plan in ("gpipe", "1f1b", "dp-pp")
    recipe = Recipe(
        network=network,
        strategy=plan,
        ranks=ranks,
        micro_batch=batch // _MICROBATCHES if pipelined else batch,
        microbatches=_MICROBATCHES if pipelined else 1,
        optimizer="adam" if isinstance(network, Gpt) else "sgd",
        dtype=dtype,
    )
    return case_of(recipe)


def case_of(recipe: Recipe) -> Case:
    """The job that a recipe is."""
    network = recipe.network
    if isinstance(network, Perceptron):
        name = "-".join(map(str, network.widths))
        return Case(
            network=f"mlp {name}", recipe=recipe, model=simpar.mlp(name, dtype=recipe.dtype), plan=plan_of(recipe)
        )
    model = Transformer(
        name=f"GPT of {network.layers} × {network.hidden}",
        layers=network.layers,
        hidden=network.hidden,
        heads=network.heads,
        gated_mlp=False,
        vocab=network.vocab,
        tied_embeddings=False,
        position="learned",
        max_positions=network.seq_len,
        norm="layernorm",
        norm_bias=False,
    )
    return Case(network=model.name, recipe=recipe, model=model, plan=plan_of(recipe))


def plan_of(recipe: Recipe) -> Plan:
    """The recipe as a plan: what DistributedDataParallel and its kin overlap, and nothing that they do not."""
    overlap = Overlap(
        grad_reduce=True,
        param_gather=recipe.strategy == "fsdp",  # ZeroRedundancyOptimizer broadcasts after its update
        tp="none",  # parallelize_module waits for each of its collectives
    )
    fields: dict[str, Any] = {
        "pp": recipe.stages,
        "dp": recipe.replicas,
        "tp": recipe.ranks if recipe.strategy == "tp" else 1,
        "zero": {"zero1": 1, "fsdp": 3}.get(recipe.strategy, 0),
        "schedule": "gpipe" if recipe.strategy == "gpipe" else "1f1b",
        "micro_batch": recipe.micro_batch,
        "grad_accum": recipe.microbatches,
        "precision": recipe.dtype,
        "grad_dtype": recipe.dtype,
        "optimizer_dtype": recipe.dtype,
        "optimizer": recipe.optimizer,
        "clip_gradients": False,
        "bucket_parameters": DDP_BUCKET_BYTES // DTYPE_BYTES[recipe.dtype],
        "overlap": overlap,
    }
    network = recipe.network
    if isinstance(network, Gpt):
        fields["seq_len"] = network.seq_len
    if recipe.stages > 1:
        fields["layer_split"] = recipe.split
    return Plan(**fields)


def cluster_of(profile: Profile, ranks: int) -> Cluster:
    """So many of the profile's devices in one node."""
    fields: dict[str, Any] = {"device": profile.device, "nodes": 1, "gpus_per_node": ranks, "fabric": None}
    if profile.node_link is not None:
        fields["node_link"] = profile.node_link
    return Cluster.model_validate(fields)


def job(case: Case, profile: Profile) -> simpar.Job:
    """The case on the profile's devices."""
    return simpar.Job(model=case.model, cluster=cluster_of(profile, case.recipe.ranks), plan=case.plan)
