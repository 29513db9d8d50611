"""The queries of the Grafana dashboard, for the tests that ask them of something."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "monitoring" / "grafana" / "dashboards" / "drafthouse.json"
VALUES = {"$__rate_interval": "1m", "$model_name": ".*", "$engine": ".*"}


def board() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def panels() -> list[dict[str, Any]]:
    """Everything that draws: rows left out."""
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Every expression of panels and annotations, as the file has it."""
    drawn = [target["expr"] for panel in panels() for target in panel["targets"]]
    return drawn + [annotation["expr"] for annotation in board()["annotations"]["list"]]


def with_values(query: str) -> str:
    """As Grafana would send it with everything selected."""
    for variable, value in VALUES.items():
        query = query.replace(variable, value)
    return query
