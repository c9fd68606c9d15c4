"""Projects: what owns jobs, who works in them, and what their jobs may name."""
