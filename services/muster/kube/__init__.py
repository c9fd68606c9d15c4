"""Kubernetes as every room of Muster speaks to it: one connection, one client, one list-and-watch."""
