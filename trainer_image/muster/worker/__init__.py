"""First process of a worker, whatever it runs: fence, ranks, stops, heartbeats, exit record.

A program's image is the user's own, so nothing here needs more than the standard library of Python 3.9, and nothing of
Muster outside of this package (tests/unit/worker/test_worker_portability.py).
"""
