"""What happened in a step, as columns, and its readers without pictures."""
