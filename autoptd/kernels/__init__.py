"""Kernels: dropout, and fused operators, each with a plain form, an eager one in torch and one in Triton: see
`forms.py`.
"""
