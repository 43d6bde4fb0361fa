"""Configurations in a few words, for tests."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def sized(model_type, sizes, **more):
    """A configuration of that type with the usual sizes, as many as are given."""
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=False)), **more}
