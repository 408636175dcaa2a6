"""`autoptd doctor`: check the collectives and channels of a launch, and their speed, before training on it.

| file | purpose |
|---|---|
| `launch` | the ranks meet in the store, which names ranks that do not arrive, and compare their versions, devices and memory |
| `checks` | one call of every method of a group and of every channel, compared with the known result; then latency and bandwidth |
| `run`, `report` | the checks on a few meshes, as text and JSON |
"""
