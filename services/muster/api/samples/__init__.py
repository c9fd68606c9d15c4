"""What jobs wrote at their evaluations."""
