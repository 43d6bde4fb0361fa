"""How a job is spread over a cluster, and the rules that it must keep."""
