"""Graph to graph, one file a pass: annotate, communicate, cut, localize; and the axis table (`rules.py`)."""
