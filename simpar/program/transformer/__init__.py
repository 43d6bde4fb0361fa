"""The kernels and collectives of a transformer on one rank, under tensor, context and expert parallelism.

Shapes follow Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022 for sequence parallelism): column-parallel QKV
and up projections, row-parallel output and down projections; experts follow its all-to-all dispatcher. A layer has two
halves (:mod:`~simpar.program.transformer.part`), one class for each kind. How many small kernels surround the products,
and what they move, says the layout's framework.
"""

from simpar.program.transformer.parts import TransformerParts

__all__ = ["TransformerParts"]
