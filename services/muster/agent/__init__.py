"""The node agent: GPU health, Xid errors and spot notices become signals."""
