"""Reports: reads run directories, nothing else, and says in pictures and words what happened.

`write_report` writes one self-contained HTML file, `summary` the same headline as plain JSON.
"""

from moesaic.report.facts import RunFacts
from moesaic.report.summary import summary
from moesaic.report.writer import write_report

__all__ = ["RunFacts", "summary", "write_report"]
