"""`autoptd doctor`: check the collectives and channels of a launch, and their speed, before training on it.

| file | purpose |
|---|---|
| `launch` | the ranks meet in the store, which names missing ones, and compare their versions, devices and memory |
| `checks` | every method of a group and every channel, compared with known results; then latency and bandwidth |
| `run`, `report` | the checks on a few meshes, as text and JSON |
"""
