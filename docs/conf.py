"""The site of these documents: `make docs`."""

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parent.parent

project = "kvxfer"
version = release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
exclude_patterns = ["openapi.json"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"kvxfer {version}"
