"""Measures real devices, fits the simulator's cost parameters to them, and checks its predictions there.

The contract with :mod:`simpar`:

* in: the local devices, or recorded measurements; a :class:`simpar.program.ir.Program` to replay;
* out: a profile (fitted parameters of a :class:`simpar.hardware.device.Device` and of a cluster's links, each with
  its source and error), and a :class:`simpar.trace.trace.Trace` with the engine's columns for whatever was replayed, so
  that a prediction and a measurement can be laid side by side.

Apart from the tracing of modules only this package imports torch, and :mod:`simpar` knows it only as a command.
"""
