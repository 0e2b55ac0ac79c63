"""`errbar serve`: a posterior behind HTTP, and a page that shows its error bars.

`service` is what is served, and `digits` the default model; `schemas` defines requests and answers, `compute` computes
the answers, and `batching` joins requests. `guard`, `connection` and `telemetry` protect and log the service; `app` has
the routes, and `server` runs them. `page/` is plain HTML, CSS and JavaScript.
"""
