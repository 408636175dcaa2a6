"""The words all stages share: mesh, value types, actions, notes, forms. Nothing here computes on tensors."""
