"""The planner: how long a step takes and what it holds, from a description of the model and of the cluster
alone.
"""
