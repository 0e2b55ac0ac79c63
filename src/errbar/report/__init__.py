"""The report of `errbar evaluate --report`: one HTML file that says how far a posterior's probabilities can be trusted.

`assess` computes everything as frozen values (`values`), `page` makes the HTML of them, `write` puts it into a file:

errbar.report.write(errbar.report.assess(posterior, test_batches), "report.html")

`observing` is the pass over the data, `scoring`, `checking` and `examples` say what is computed of it, `verdict` puts
it into words; `axes` and `charts` draw, `markup` escapes.
"""

from errbar.report.assessing import assess
from errbar.report.page import page, write
from errbar.report.values import Report

__all__ = ["Report", "assess", "page", "write"]
