"""What collectives hold while the host runs ahead, against a queue that is replayed launch by launch."""

import random
from collections import deque

import pytest
from synthetic import job

from simpar import Cluster, Plan, Transformer, simulate
from simpar.framework.framework import framework
from simpar.model.work import MemoryBound
from simpar.program.ir import Block, Collective, Group, Launch, host_launches
from simpar.program.queue import QUEUE_LAUNCHES, backward_bytes, forward_bytes
from simpar.program.unit import Unit

TP = Group("tp", range(4))
LLAMA = Transformer(
    name="small", layers=4, hidden=1024, heads=16, ffn_hidden=4096, gated_mlp=True, vocab=32000, tied_embeddings=False
)
B, S, T = 2, 2048, 4
FULL = B * S * LLAMA.hidden * 2
"""Bytes of the residual stream of all tokens."""


def block(launches: int, gathers: int, nbytes: float) -> Block:
    kernels = Launch(MemoryBound(1), "kernels", launches=launches - gathers)
    return Block("unit", (kernels, *[Collective("all_gather", nbytes, TP)] * gathers))


def unit(forward: Block, backward: Block, kept: int) -> Unit:
    nothing = Block("unit", ())
    return Unit(
        "unit",
        parameters=0,
        forward=forward,
        backward=backward,
        backward_input=nothing,
        backward_weight=nothing,
        activation_bytes=kept,
    )


def replayed(units: list[Unit], passes: int, *, backward: bool) -> float:
    """The most that is held beyond all activations, if each launch of a unit brings its even share of the bytes."""
    queue: deque[float] = deque(maxlen=QUEUE_LAUNCHES)

    def run(body: Block) -> None:
        launches = host_launches(body.body)
        nbytes = sum(c.nbytes for c in body.body if isinstance(c, Collective))
        queue.extend([nbytes / launches] * launches)

    for each in units * passes:
        run(each.forward)
    most, freed = sum(queue), 0.0
    for each in reversed(units if backward else []):
        run(each.backward)
        freed += each.activation_bytes
        most = max(most, sum(queue) - freed)
    return most


@pytest.mark.parametrize("seed", range(8))
def test_the_queue_holds_what_its_last_launches_work_on(seed):
    dice = random.Random(seed)
    units = [
        unit(
            block(dice.randint(10, 200), dice.randint(0, 4), dice.randint(1, 10**6)),
            block(dice.randint(10, 200), dice.randint(0, 6), dice.randint(1, 10**6)),
            dice.randint(0, 10**6),
        )
        for _ in range(dice.randint(1, 20))
    ]
    for passes in (0, 1, 3):
        assert forward_bytes(units, passes) == pytest.approx(replayed(units, passes, backward=False), abs=1)
    assert backward_bytes(units) == pytest.approx(replayed(units, 1, backward=True), abs=1)


def test_other_groups_and_reductions_that_are_waited_for_hold_nothing():
    others = (Collective("all_gather", 10.0, Group("cp", range(2))), Collective("reduce_scatter", 10.0, TP))
    assert forward_bytes([unit(Block("unit", others), Block("unit", ()), 0)], 1) == 0


def peak(*, records: bool, unqueued: int = 2, **plan: object) -> int:
    """Activations of the first stage."""
    software = framework("nanotron").replace(records_streams=records, unqueued_passes=unqueued)
    cluster = Cluster.parse("h100-sxm:8")
    fields = {"framework": software, "tp": T, "sequence_parallel": True, "micro_batch": B, "seq_len": S, **plan}
    first, *_ = simulate(job(LLAMA, cluster, **fields)).footprints
    return first.by_category["activations"]


def test_without_a_pipeline_what_two_gathers_a_layer_and_the_head_s_bring_is_held():
    # 4 layers and their head are far fewer than 1,024 launches; backward holds more yet: four gathers, two scatters
    held = peak(records=True, grad_accum=4) - peak(records=False, grad_accum=4)
    assert held >= (2 * LLAMA.layers + 1) * FULL
    assert peak(records=True, tp=1, sequence_parallel=False) == peak(records=False, tp=1, sequence_parallel=False)


@pytest.mark.parametrize(("pp", "unqueued", "passes"), [(2, 2, 0), (4, 2, 2), (4, 1, 3), (4, 0, 4), (4, 5, 0)])
def test_a_first_stage_holds_what_its_passes_before_the_first_message_bring_less_some(pp, unqueued, passes):
    plan = {"pp": pp, "tp": 2, "grad_accum": 8, "layer_split": (LLAMA.layers // pp,) * pp}
    held = peak(records=True, unqueued=unqueued, **plan) - peak(records=False, **plan)
    assert held == passes * 2 * LLAMA.layers // pp * FULL


def test_nanotron_s_peaks_show_all_but_two_passes_and_no_other_framework_holds_any():
    assert framework("nanotron").unqueued_passes == 2
    assert Plan(framework="torchtitan").framework.records_streams is False
