"""Differences between torch releases (2.11 to 2.13), and every private import, in one place."""

from __future__ import annotations
