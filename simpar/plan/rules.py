"""Rules that a plan must keep for a model; each refusal is a :class:`~simpar.errors.PlanError` with its mend."""

from simpar.errors import PlanError
from simpar.model.module import ModuleModel
from simpar.model.transformer import Transformer
from simpar.plan.kinds import expert_fields
from simpar.plan.plan import Plan


def check_transformer(plan: Plan, model: Transformer) -> None:
    """Degrees that must divide what a transformer has, and fields that ask more of it than it has."""
    tp = plan.tp
    has_mlp = any(kind.mlp == "dense" for kind in model.layer_kinds)
    for what, count in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden if has_mlp else tp)):
        if count % tp:
            raise PlanError(
                f"tp {tp} does not divide the {count} {what} of {model.name}; set tp to a divisor of {count}"
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise PlanError(
            f"tp {tp} neither divides nor is a multiple of the {model.kv_heads} kv_heads of {model.name}; "
            f"set tp to a divisor of {model.kv_heads}"
        )
    if plan.cp > 1 and plan.cp_method == "all_to_all" and model.heads // tp % plan.cp:
        raise PlanError(
            f"cp {plan.cp} with cp_method 'all_to_all' splits the {model.heads // tp} heads of a rank of {model.name}, "
            "which it does not divide; set cp to a divisor, or cp_method=ring"
        )
    groups = max(1, model.kv_heads // tp)
    if plan.cp > 1 and plan.cp_method == "all_to_all" and groups % plan.cp and plan.cp % groups:
        raise PlanError(
            f"cp {plan.cp} with cp_method 'all_to_all' neither divides nor is a multiple of the {groups} kv_heads of a "
            f"rank of {model.name}; set cp to a divisor of {groups}, or cp_method=ring"
        )
    if plan.sequence_parallel and tp == 1:
        raise PlanError(
            "sequence_parallel shards over the tensor-parallel group, but tp is 1; raise tp or switch it off"
        )
    if plan.frozen_layers is not None and plan.frozen_layers > model.layers:
        raise PlanError(
            f"frozen_layers {plan.frozen_layers} is more than the {model.layers} layers of {model.name}; "
            f"set frozen_layers to at most {model.layers}"
        )
    if plan.frozen_layers is not None and model.tied_embeddings:
        raise PlanError(
            f"frozen_layers {plan.frozen_layers} freezes the embedding, which is also the head of {model.name}; "
            "set tied_embeddings=false or drop frozen_layers"
        )
    if plan.recompute_layers is not None and plan.recompute_layers > model.layers:
        raise PlanError(
            f"recompute_layers {plan.recompute_layers} is more than the {model.layers} layers of {model.name}; "
            "set recompute_layers lower or drop it to recompute all"
        )
    if model.max_positions and model.position == "learned" and plan.seq_len and plan.seq_len > model.max_positions:
        raise PlanError(
            f"seq_len {plan.seq_len} is longer than the {model.max_positions} learned positions of {model.name}; "
            f"set seq_len to at most {model.max_positions}"
        )


def check_sequence(plan: Plan, seq_len: int) -> None:
    """Context and sequence parallelism cut the sequence into equal pieces."""
    if plan.cp > 1 and seq_len % (2 * plan.cp):
        raise PlanError(
            f"cp {plan.cp} cuts seq_len {seq_len} into {2 * plan.cp} pieces, so that causal work is even, but these "
            f"do not divide it; set seq_len to a multiple of {2 * plan.cp}"
        )
    if plan.sequence_parallel and seq_len // plan.cp % plan.tp:
        raise PlanError(
            f"sequence_parallel splits seq_len {seq_len // plan.cp} over tp {plan.tp}, which does not divide it; "
            f"set seq_len to a multiple of {plan.tp * plan.cp}"
        )


def check_module(plan: Plan, model: ModuleModel) -> None:
    """What a traced module has no parts for."""
    for name, value, usual in expert_fields(plan):
        if value != usual:
            raise PlanError(
                f"{name} {value} needs a transformer description, but {model.name} is a traced module; drop it"
            )
    if plan.tp > 1:
        raise PlanError(f"tp {plan.tp} needs a transformer description, but {model.name} is a traced module; set tp=1")
    if plan.cp > 1:
        raise PlanError(f"cp {plan.cp} needs a transformer description, but {model.name} is a traced module; set cp=1")
    if plan.seq_len is not None:
        raise PlanError(f"seq_len {plan.seq_len} has no meaning for the module {model.name}; drop it")
    if plan.frozen_layers is not None:
        raise PlanError(
            f"frozen_layers {plan.frozen_layers} has no meaning for the module {model.name}; drop it and trace the "
            "module with requires_grad_(False) on what is frozen"
        )
    if plan.recompute == "selective":
        raise PlanError(f"recompute 'selective' needs a transformer description, not {model.name}; set recompute=full")
