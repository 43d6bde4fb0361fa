"""What every rank runs: the intermediate form, and how a job is lowered to it."""
