"""The report of `errbar evaluate --report`: one HTML file that says how far a posterior's probabilities can be trusted.

`assess` computes everything as frozen values (`values`), `page` turns them into HTML, and `write` saves that to a file:

errbar.report.write(errbar.report.assess(posterior, test_batches), "report.html")

`observing` is the pass over the data; `scoring`, `checking` and `examples` compute from it, and `verdict` puts the
result into words. `axes` and `charts` draw, `markup` escapes.
"""

from errbar.report.assessing import assess
from errbar.report.page import page, write
from errbar.report.values import Report

__all__ = ["Report", "assess", "page", "write"]
