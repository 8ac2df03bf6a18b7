"""Charts of a report."""

from moesaic.report.charts.figure import Figure

__all__ = ["Figure"]
