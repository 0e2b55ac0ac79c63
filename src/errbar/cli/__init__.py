"""The commands of `errbar`: each reads its options, calls the library, writes one file at most, and says what it did.

`options` and `choices` are what can be typed; `named`, `models`, `rows` and `source` find models and data; `writers`
writes results; `session` speaks to people or machines, and to the other ranks of a job.
"""
