"""Pictures of a program: plain data in, SVG, DOT and JSON text out.

`picture` draws a graph at three levels; `schedule_chart` draws a step over time, and `runs` writes it as a trace.
"""

from autoptd.wings.viz.picture import Picture, graph_picture
from autoptd.wings.viz.runs import Run, trace_json
from autoptd.wings.viz.schedule_chart import schedule_svg

__all__ = ["Picture", "Run", "graph_picture", "schedule_svg", "trace_json"]
