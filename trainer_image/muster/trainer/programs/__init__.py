"""Muster's own processes beside a program of the user's own: `prepare` fills the node's disk before the program starts,
and `keeper` keeps the checkpoints that it writes. Both run with Muster's interpreter, never with the program's."""
