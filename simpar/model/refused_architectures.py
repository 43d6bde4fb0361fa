"""Architectures that cannot be imported, with the reason, and files that contradict their architecture."""

from collections.abc import Collection, Mapping

from simpar.errors import ModelError
from simpar.model.config_reader import ConfigReader

_STATE_SPACE = "has state-space (Mamba) layers, whose scan is not described"
_INDEXER = "chooses the keys of each query by an indexer, whose weights and work are not described"
_CONVOLUTION = "has short convolutions in place of attention, which are not described"
_CROSS = "has layers that attend to an image, which are not described"
_HEADS = "has other heads in its windowed layers than in those with full attention"
_RECURRENT = "has recurrent layers, which are not described"
_WIDTHS = "has layers of different widths, and a Transformer's layers have one"
_PER_LAYER = "feeds each layer embeddings of its own, which are not described"

REFUSED: Mapping[str, str] = {
    "bailing_hybrid": "has lightning attention with norms by group of heads, which is not described",
    "bamba": _STATE_SPACE,
    "deci": _WIDTHS,
    "deepseek_v32": _INDEXER,
    "diffllama": "subtracts two attention maps in each layer, of which only one would be described",
    "falcon_h1": _STATE_SPACE,
    "falcon_mamba": _STATE_SPACE,
    "gemma3n": _PER_LAYER,
    "gemma3n_text": _PER_LAYER,
    "gemma4": _HEADS,
    "gemma4_text": _HEADS,
    "glm_moe_dsa": _INDEXER,
    "jamba": _STATE_SPACE,
    "jetmoe": "sends tokens to experts of the attention as well, which are not described",
    "kimi_linear": "has Kimi Delta Attention, whose gates are not described",
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "longcat_flash": "has experts that compute nothing, so that its work depends on the text",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "mimo_v2_flash": _HEADS,
    "mllama": _CROSS,
    "mllama_text_model": _CROSS,
    "nemotron-nas": _WIDTHS,
    "nemotron_h": _STATE_SPACE,
    "openelm": _WIDTHS,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "xlstm": _RECURRENT,
    "zamba": _STATE_SPACE,
    "zamba2": _STATE_SPACE,
}
"""Architectures that are known and cannot be described, with the reason."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LATENT_KEYS = ("kv_lora_rank",)


def check_dense(read: ConfigReader, model_type: str, known: Collection[str]) -> None:
    """Refuses a file that has experts or latent attention although its architecture has none.

    Raises:
        ModelError: such a field has a value that would be lost.
    """
    for key in (*_EXPERT_KEYS, *_LATENT_KEYS):
        value = read.config.get(key)
        if value is None or (isinstance(value, int) and value in (0, 1)):
            continue
        read.count(key)
        what = "latent attention" if key in _LATENT_KEYS else "experts"
        raise ModelError(
            f"{read.label}: {key} is {value}, but the architecture '{model_type}' has no {what}; set model_type to one"
            f" that has, such as {', '.join(sorted(known)[:3])}, or drop {key}"
        )
