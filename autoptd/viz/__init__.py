"""Pictures of what was decided: plain data in, SVG text out."""

from autoptd.viz.schedule_chart import schedule_svg

__all__ = ["schedule_svg"]
