"""Pictures of what was decided: plain data in, SVG, DOT and JSON text out.

`picture` draws a program's graph at three levels; `schedule_chart` and `trace_file` a step over time;
`collectives` is a table of what is communicated; `draw` writes all of it into a folder.
"""

from autoptd.wings.viz.draw import draw
from autoptd.wings.viz.picture import Picture, graph_picture
from autoptd.wings.viz.runs import Run
from autoptd.wings.viz.schedule_chart import schedule_svg
from autoptd.wings.viz.trace_file import trace_json

__all__ = ["Picture", "Run", "draw", "graph_picture", "schedule_svg", "trace_json"]
