"""Rules that a plan must keep for layers of special kinds: experts, latent and linear attention."""

from simpar.errors import PlanError
from simpar.model.transformer import Transformer
from simpar.plan.plan import Plan
from simpar.plan.samples import StepSamples


def expert_fields(plan: Plan) -> tuple[tuple[str, object, object], ...]:
    """Fields that only experts give a meaning: name, value, value that says nothing."""
    return (
        ("ep", plan.ep, 1),
        ("etp", plan.etp, None),
        ("expert_skew", plan.expert_skew, 0.0),
        ("expert_capacity", plan.expert_capacity, None),
    )


def check_experts(plan: Plan, model: Transformer, dp: int, sharded_copies: int) -> None:
    """Rules of expert parallelism.

    Args:
        plan: the plan.
        model: the model.
        dp: data-parallel degree.
        sharded_copies: replicas of the states that ZeRO shards.

    Raises:
        PlanError: the first rule that is broken.
    """
    moe, tp, ep = model.moe, plan.tp, plan.ep
    if moe is None:
        for name, value, usual in expert_fields(plan):
            if value != usual:
                raise PlanError(f"{name} {value} spreads experts, but {model.name} has none; drop {name}")
        return
    etp = plan.etp or tp
    if moe.experts % ep:
        raise PlanError(
            f"ep {ep} does not divide the {moe.experts} experts of {model.name}; set ep to a divisor of {moe.experts}"
        )
    if moe.ffn_hidden % etp:
        default = "" if plan.etp else " (that of tp)"
        raise PlanError(
            f"etp {etp}{default} does not divide the experts' ffn_hidden {moe.ffn_hidden} of {model.name}; "
            f"set etp to a divisor of {moe.ffn_hidden}"
        )
    if moe.shared_ffn_hidden % tp:
        raise PlanError(
            f"tp {tp} does not divide the shared experts' ffn_hidden {moe.shared_ffn_hidden} of {model.name}; "
            f"set tp to a divisor of {moe.shared_ffn_hidden}"
        )
    ranks = tp * plan.cp * dp
    if ranks % (ep * etp):
        raise PlanError(
            f"ep {ep} × etp {etp} = {ep * etp} does not divide the {ranks} ranks of a stage (tp {tp} × cp {plan.cp} × "
            f"dp {dp}), over which experts are spread; choose degrees whose product divides {ranks}"
        )
    if tp > 1 and etp != tp and not plan.sequence_parallel:
        raise PlanError(
            f"etp {etp} beside tp {tp} needs sequence_parallel: without it tensor-parallel ranks hold the same tokens, "
            "and each would send all of them to the experts; set sequence_parallel=true or drop etp"
        )
    if ranks // (ep * etp) % sharded_copies:
        raise PlanError(
            f"dp_shard {plan.dp_shard} makes {sharded_copies} replicas of the sharded states, among which the "
            f"{ranks // (ep * etp)} ranks with the same experts cannot be divided; raise dp_shard or lower ep"
        )


def check_expert_samples(plan: Plan, model: Transformer, samples: StepSamples) -> None:
    """Refuses samples of different lengths where replicas share experts: they trade tokens in equal parts.

    Raises:
        PlanError: replicas that share experts have microbatches of different lengths.
    """
    if model.moe is None or plan.tp * plan.cp % (plan.ep * (plan.etp or plan.tp)) == 0:
        return  # experts lie within a replica
    lengths = set(samples.padded)
    if len(lengths) > 1:
        longest = max(map(max, lengths))
        raise PlanError(
            f"data gives replicas microbatches of different lengths, but with ep {plan.ep} and etp "
            f"{plan.etp or plan.tp} they share experts and trade equally many tokens; set ep=1 and etp={plan.tp}, or "
            f"pad all to one length with data.multiple={longest}"
        )


def check_kinds(plan: Plan, model: Transformer) -> None:
    """Rules of linear attention, whose heads are divided on their own.

    Raises:
        PlanError: the first rule that is broken.
    """
    if model.linear is None:
        return
    split = plan.tp * plan.cp
    for what, count in (("key_heads", model.linear.key_heads), ("value_heads", model.linear.value_heads)):
        if count % plan.tp:
            raise PlanError(
                f"tp {plan.tp} does not divide the {count} linear {what} of {model.name}; "
                f"set tp to a divisor of {count}"
            )
        if count % split:
            raise PlanError(
                f"cp {plan.cp} trades a sequence for the {count // plan.tp} linear {what} of a rank of {model.name}, "
                f"which it does not divide; set cp to a divisor of {count // plan.tp}"
            )
