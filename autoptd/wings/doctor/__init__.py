"""`autoptd doctor`: whether the collectives and channels of a launch are right, and how fast, before a model
is trained on it.

| file | what |
|---|---|
| `arrival`, `facts` | the ranks meet in the store; versions, devices, who does not come |
| `meshes` | which meshes are looked at |
| `patterns`, `calls` | numbers with known sums; every call of groups and channels held against them |
| `traffic` | calls under way at once, in the order of a schedule |
| `timing`, `slow` | seconds of groups and channels, and which stand out |
| `examine`, `report`, `run` | all of that on one mesh, as text and JSON, on all ranks |
"""
