"""`errbar serve`: a posterior behind HTTP, and a page where its error bars can be seen and touched.

`served` is what is served and `digits` what is served when nothing is given; `schemas` says what may be asked,
`answers` computes it, `batching` puts requests together; `guard`, `connection` and `record` keep the door; `app` has
the routes, `server` runs them. `page/` is plain HTML, CSS and JavaScript.
"""
