"""The result of a simulated job: a plain record of the trace, and the figures that people ask of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Any

from simpar.economics import Cost, cost
from simpar.hardware.device import Device
from simpar.job import Job
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout
from simpar.program.footprint import Footprint, fullest
from simpar.program.work import Share
from simpar.trace.breakdown import RankTime, breakdown, bubble_fraction
from simpar.trace.cycles import cycle_s
from simpar.trace.trace import Trace
from simpar.units import GB, TFLOP, format_bytes, format_count, format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from simpar.uncertainty import Spread

MFU_CONVENTION = (
    "MFU counts 3 × forward FLOP of the model (matrix products, full attention without halving for the causal mask, as "
    "the PaLM and Megatron-LM papers do), HFU adds what is recomputed; both over the dense peak of the dtype that runs"
)


@dataclass(frozen=True, repr=False)
class Result:
    """One simulated step.

    Attributes:
        job: what was simulated.
        layout: the plan with everything filled in.
        trace: what happened.
        footprints: peak memory of every simulated rank.
        recomputed_share: how much of the forward pass runs again.
        warnings: what a careful reader should know.
        host_bytes: memory of the fullest host that is held for its ranks (``plan.offload``).
    """

    job: Job
    layout: Layout
    trace: Trace
    footprints: tuple[Footprint, ...]
    recomputed_share: Share
    warnings: tuple[str, ...]
    host_bytes: int = 0

    # ---- speed ------------------------------------------------------------------------------------------------------

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step; of several on the mean.

        Where workers do not wait for each other, those in which all of them together do the work of a step; where they
        do not run apart by more than a bound, those of the slowest.
        """
        return self._step_s

    @cached_property
    def _step_s(self) -> float:
        steps, server = self.layout.steps, self.layout.server
        if server is None or server.is_synchronous:
            return self.trace.step_s / steps
        cycles = list(cycle_s(self.trace, steps).values())
        return max(cycles) if server.bound is not None else harmonic_mean(cycles)

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batch per second."""
        return self.layout.global_batch / self.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole cluster; for a module, samples."""
        return self.layout.step_tokens / self.step_time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and GPU; for a module, samples."""
        return self.tokens_per_s / self.job.cluster.gpus

    @cached_property
    def model_flop(self) -> float:
        """FLOP of the model itself in one step, by :data:`MFU_CONVENTION`."""
        model, batch = self.job.model, self.layout.global_batch
        if isinstance(model, Transformer):
            frozen, seq_len = self.layout.plan.frozen_layers or 0, self.layout.seq_len
            if self.layout.samples is not None:
                counts = Counter(self.layout.samples.lengths)
                return sum(
                    model.step_flop(count * length, length, "full", frozen_layers=frozen).total
                    for length, count in counts.items()
                )
            return model.step_flop(batch * seq_len, seq_len, "full", frozen_layers=frozen).total
        return model.step_flop(batch)

    @property
    def recomputed_flop(self) -> float:
        """FLOP that recomputation adds, by the same convention: the share of the forward pass that runs again."""
        model, share = self.job.model, self.recomputed_share
        if not isinstance(model, Transformer):
            return share.products * self.model_flop / 3
        forward = model.flop_per_token(self.layout.seq_len, "full")
        tokens = self.layout.step_tokens
        return tokens * (share.products * forward.matmul + share.attention * forward.attention)

    @property
    def peak_flop_per_s(self) -> float:
        """Dense peak of the whole cluster, all kinds of devices together, in the plan's precision."""
        cluster = self.job.cluster
        kinds = zip(cluster.devices, cluster.gpus_by_kind, strict=True)
        return float(sum(device.peak(self.layout.precision) * gpus for device, gpus in kinds))

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation (0 to 1)."""
        return self.model_flop / self.step_time_s / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation (0 to 1): model FLOP and recomputed ones."""
        return (self.model_flop + self.recomputed_flop) / self.step_time_s / self.peak_flop_per_s

    # ---- where time and bytes go ------------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> tuple[RankTime, ...]:
        """The time of every simulated rank; of several steps on the mean."""
        steps = self.layout.steps
        return tuple(rank.over(steps) for rank in breakdown(self.trace) if rank.replicas)

    @cached_property
    def bubble_fraction(self) -> float:
        """Share of the step in which ranks have nothing to do, on the mean of all ranks."""
        return bubble_fraction(self.trace)

    @cached_property
    def exposed_fraction(self) -> float:
        """Share of the step in which compute waits for communication or its host's part, on the mean of all ranks."""
        total = sum(rank.replicas for rank in self.ranks)
        waited = sum(rank.replicas * sum(rank.exposed_s.values()) for rank in self.ranks)
        return waited * self.layout.steps / (total * self.trace.step_s) if self.trace.step_ns else 0.0

    @cached_property
    def communication_bytes(self) -> dict[str, float]:
        """Buffer bytes of the collectives and messages of one rank of the busiest stage, by group."""
        layout = self.layout
        inside = layout.plan.tp * layout.plan.cp > 1 or layout.has_experts  # some groups meet inside operations only
        spans = self.trace.kernels() if inside else None
        totals: dict[tuple[int, str], float] = {}
        for table in (self.trace.spans, spans):
            if table is None:
                continue
            for index, lane in enumerate(self.trace.lanes):
                if lane.stream != "compute" and lane.replicas:
                    carried = float(table.nbytes[table.lane == index].sum())
                    totals[lane.rank, lane.stream] = totals.get((lane.rank, lane.stream), 0.0) + carried
        most: dict[str, float] = {}
        for (_, stream), carried in totals.items():
            most[stream] = max(most.get(stream, 0.0), carried)
        return {stream: carried / self.layout.steps for stream, carried in most.items() if carried}

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the fullest rank."""
        return max(f.peak_bytes for f in self.footprints)

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device."""
        worst, device = self.fullest
        return worst.peak_bytes <= device.memory_bytes

    @cached_property
    def fullest(self) -> tuple[Footprint, Device]:
        """The rank that needs the largest share of its device's memory, and that device."""
        return fullest(self.footprints, self.layout, self.job.cluster)

    # ---- certainty, money and energy ---------------------------------------------------------------------------------

    @cached_property
    def uncertainty(self) -> "Spread":
        """By how much the prediction may be off, from the errors that the descriptions state of themselves."""
        from simpar.uncertainty import spread  # noqa: PLC0415 - it reads results

        return spread(self)

    def step_time_interval(self, level: float = 0.8) -> tuple[float, float]:
        """Seconds between which the step time lies with probability ``level``; see :mod:`simpar.uncertainty`."""
        from simpar.uncertainty import interval  # noqa: PLC0415 - a reader of results

        return interval(self, level)

    @property
    def busy_fraction(self) -> float:
        """Share of the step in which devices compute, on the mean of all ranks."""
        busy = sum(
            r.replicas * (sum(r.compute_s.values()) + r.optimizer_s + r.interference_s) for r in self.ranks
        ) / sum(r.replicas for r in self.ranks)
        return min(busy / self.step_time_s, 1.0) if self.step_time_s else 0.0

    def cost(self, tokens: float | None = None) -> Cost:
        """Money and energy of a step, and of a training run of so many tokens (samples for a module).

        Raises:
            ClusterError: ``tokens`` is not positive.
        """
        return cost(
            self.job.cluster,
            step_s=self.step_time_s,
            busy_fraction=self.busy_fraction,
            step_tokens=self.layout.step_tokens,
            tokens=tokens,
        )

    # ---- readers ----------------------------------------------------------------------------------------------------

    def timeline(self, *, dark: bool = False, budget: int = 5000, kernels: bool = False) -> "go.Figure":
        """The step as a Plotly figure; ``.write_html(path)`` or :meth:`write_timeline` make a file of it."""
        from simpar.view.timeline import timeline  # noqa: PLC0415 - plotly only where it draws

        return timeline(
            self.trace,
            title=self.title,
            headline=self.headline,
            dark=dark,
            budget=budget,
            kernels=kernels,
            memory_capacity_bytes=self.job.cluster.device.memory_bytes,
        )

    def view(self, kind: str, *, dark: bool = False) -> "go.Figure":
        """One of the views of :data:`simpar.view.views.VIEWS`, such as ``"roofline"``, as a Plotly figure.

        Raises:
            JobError: there is no such view.
        """
        from simpar.view.views import view  # noqa: PLC0415 - plotly only where it draws

        return view(self, kind, dark=dark)

    def write_timeline(self, path: str, *, dark: bool = False, budget: int = 5000, kernels: bool = False) -> None:
        """Writes the timeline as one HTML file that needs no network."""
        from simpar.view.timeline import write_timeline  # noqa: PLC0415

        write_timeline(self.timeline(dark=dark, budget=budget, kernels=kernels), path)

    def compare(
        self,
        other: "Result | Trace",
        *,
        words: tuple[str, str] | None = None,
        dark: bool = False,
        budget: int = 5000,
    ) -> "go.Figure":
        """This step and another on one time axis: of another job, or as measured (a replay, an imported profile).

        Args:
            other: drawn below this one.
            words: what the two are called.
            dark: dark instead of light surfaces.
            budget: bars, at most.
        """
        from simpar.view.compare import compare  # noqa: PLC0415

        if isinstance(other, Result):
            trace, named, subtitle = other.trace, ("first", "second"), f"against {other.title}"
        else:
            trace, named, subtitle = other, ("predicted", "measured"), ""
        return compare(
            self.trace, trace, words=words or named, title=self.title, subtitle=subtitle, dark=dark, budget=budget
        )

    @property
    def title(self) -> str:
        """Model, cluster and plan in one line."""
        plan, cluster = self.layout.plan, self.job.cluster
        degrees = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "ep": plan.ep}
        if self.layout.has_experts and self.layout.etp != plan.tp:
            degrees["etp"] = self.layout.etp
        degrees |= {"dp": self.layout.dp, "zero": plan.zero}
        shown = " ".join(
            f"{name}={n}" for name, n in degrees.items() if n > 1 or name in ("dp", "etp") or (name == "zero" and n)
        )
        schedule = f" · {plan.schedule}" + (f" ×{plan.vpp}" if plan.vpp > 1 else "") if plan.pp > 1 else ""
        kinds = zip(cluster.devices, cluster.gpus_by_kind, strict=True)
        gpus = " + ".join(f"{count:,} {device.name}" for device, count in kinds)
        offload = f" · offload={plan.offload}" if plan.offload != "none" else ""
        return f"{self.job.model.name} on {gpus} · {shown}{schedule}{offload}"

    @property
    def subtitle(self) -> str:
        """The main figures in one line."""
        return " · ".join(f"{name} {value}" for name, value in self.headline.items())

    @property
    def headline(self) -> dict[str, str]:
        """The main figures by name, for headings."""
        return {
            "step": format_time(self.step_time_s),
            f"{self.unit}/s": format_count(self.tokens_per_s),
            "MFU": f"{self.mfu:.1%}",
            "bubble": f"{self.bubble_fraction:.1%}",
            "exposed communication": f"{self.exposed_fraction:.1%}",
            "peak memory": format_bytes(self.peak_memory_bytes),
        }

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return "tokens" if isinstance(self.job.model, Transformer) else "samples"

    @property
    def expert_load(self) -> float | None:
        """What the fullest rank of an expert-parallel group gets over the mean; None for a model without experts."""
        if not isinstance(self.job.model, Transformer) or self.job.model.moe is None:
            return None
        plan, moe = self.job.plan, self.job.model.moe
        if plan.expert_capacity is not None:
            moe = moe.replace(capacity_factor=plan.expert_capacity)
        return plan.ep * moe.rank_shares(plan.ep, plan.expert_skew)[0]

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """Everything that the report says, as plain values; times in seconds, memory in bytes.

        Args:
            tokens: of a training run whose cost is to be in it; see :meth:`cost`.
        """
        worst, device = self.fullest
        return {
            "step_time_s": self.step_time_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "mfu_convention": MFU_CONVENTION,
            "model_flop": self.model_flop,
            "model_tflop_per_s_per_gpu": self.model_flop / self.step_time_s / self.job.cluster.gpus / TFLOP,
            "bubble_fraction": self.bubble_fraction,
            "gpus": self.job.cluster.gpus,
            "microbatches": self.layout.microbatches,
            **({} if self.expert_load is None else {"expert_load": self.expert_load}),
            "global_batch": self.layout.global_batch,
            "breakdown": [_rank_dict(rank) for rank in self.ranks],
            "communication_bytes": self.communication_bytes,
            "links": [_link_dict(link, self.trace.step_s, self.layout.steps) for link in self._links()],
            "memory": {
                "peak_bytes": worst.peak_bytes,
                "capacity_bytes": device.memory_bytes,
                "fits": self.fits,
                "by_category": worst.by_category,
                "host_bytes": self.host_bytes,
                "by_stage": [
                    {
                        "stage": f.stage,
                        "rank": f.rank,
                        "peak_bytes": f.peak_bytes,
                        "by_category": f.by_category,
                    }
                    for f in self.footprints
                ],
            },
            "cost": self.cost(tokens).to_dict(),
            "warnings": list(self.warnings),
        }

    def _links(self) -> list[Any]:
        return sorted(self.trace.links, key=lambda link: (-link.nbytes / link.capacity_bytes_per_s, link.name))

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td>{value}</td></tr>"
            for name, value in self.summary().items()
        )
        return f"<table><caption>{escape(self.title)}</caption>{rows}</table>"

    def __repr__(self) -> str:
        return f"<Result: {self.title} · {self.subtitle}>"

    def summary(self) -> dict[str, str]:
        """The main figures with their units, as text."""
        worst, device = self.fullest
        return {
            "step time": format_time(self.step_time_s),
            f"{self.unit}/s": f"{self.tokens_per_s:,.0f}",
            f"{self.unit}/s/GPU": f"{self.tokens_per_s_per_gpu:,.1f}",
            "MFU": f"{self.mfu:.1%}",
            "HFU": f"{self.hfu:.1%}",
            "bubble": f"{self.bubble_fraction:.1%}",
            "peak memory": f"{format_bytes(worst.peak_bytes)} of {format_bytes(device.memory_bytes)}",
        }


def _rank_dict(rank: RankTime) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "rank": rank.rank,
        "replicas": rank.replicas,
        "compute_s": rank.compute_s,
        "optimizer_s": rank.optimizer_s,
        "interference_s": rank.interference_s,
        "host_wait_s": rank.host_wait_s,
        "exposed_communication_s": rank.exposed_s,
        "hidden_communication_s": rank.hidden_s,
        "bubble_s": rank.bubble_s,
    }


def _link_dict(link: Any, trace_s: float, steps: int) -> Mapping[str, Any]:
    return {
        "link": link.name,
        "bytes": link.nbytes / steps,
        "capacity_gb_per_s": link.capacity_bytes_per_s / GB,
        "utilisation": link.nbytes / (link.capacity_bytes_per_s * trace_s),
    }
