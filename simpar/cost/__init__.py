"""Costs as pure functions of descriptions: kernels, collectives, memory."""
