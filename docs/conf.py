"""Settings of Sphinx for `make docs`: Markdown, and a theme that fetches nothing from the network."""

project = "AutoPTD"
html_title = "AutoPTD"
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
extensions = ["myst_parser"]
# Links may name headings down to this level.
myst_heading_anchors = 4
# Emitted code and shell commands with placeholders are not always what a lexer expects.
suppress_warnings = ["misc.highlighting_failure"]
