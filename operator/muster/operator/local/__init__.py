"""The local world: workers are process trees on virtual nodes of this one machine."""
