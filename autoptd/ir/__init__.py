"""The vocabulary shared by all stages: mesh, value types, actions, notes, forms. Nothing here computes on
tensors.
"""
