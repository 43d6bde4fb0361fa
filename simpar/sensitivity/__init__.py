"""How the step time answers to each parameter of the machine, read off the critical path."""
