"""Frameworks: what training software does that costs time, as descriptions with sources."""
