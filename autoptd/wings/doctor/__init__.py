"""`autoptd doctor`: check the collectives and channels of a launch, and how fast they are, before training on it.

| file | what |
|---|---|
| `facts` | what a rank knows about itself (versions, device, memory), and what is wrong with all of these together |
| `launch` | the ranks meet in the store: names the ones that do not arrive |
| `checks` | one call of every method of a group and of every channel, compared with the known result |
| `speed` | latency and bandwidth of every group and channel |
| `run`, `report` | all of it on a few meshes, as text and JSON |
"""
