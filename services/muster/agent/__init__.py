"""The node agent: what GPUs, kernel log, network, disks and the cloud say of one node becomes notices and metrics.

Sources look (imds.py, kernel_log.py, gpus.py, fabric.py, disks.py), the board holds what they found (board.py), and it
is reported: over HTTP to the workers of the node (server.py), to the Node object (node.py), or to a file (folder.py).
Nothing here kills, drains or resets anything: that is the operator's.
"""
