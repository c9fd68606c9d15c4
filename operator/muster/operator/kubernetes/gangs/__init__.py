"""Gang schedulers behind one protocol: who decides when all workers of a gang get their nodes together."""
