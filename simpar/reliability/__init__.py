"""Runs of days: how much of the time trains, with failures, checkpoints and restarts; and steps over many draws."""
