"""Report of a run: charts, findings and headline numbers, read from run directories alone.

`write_report` writes one self-contained HTML file; `summary` returns the headline as plain JSON.
"""

from moesaic.report.facts import RunFacts
from moesaic.report.summary import summary
from moesaic.report.writer import write_report

__all__ = ["RunFacts", "summary", "write_report"]
