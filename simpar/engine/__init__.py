"""Executes a program on a SimPy clock and writes its trace; nothing else in simpar has a clock."""
