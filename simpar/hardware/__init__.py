"""Devices, clusters and the links between them, as descriptions."""
