"""Access of every part of Muster to Kubernetes: one connection, one client, one list-and-watch."""
