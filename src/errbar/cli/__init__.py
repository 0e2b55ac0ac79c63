"""The commands of `errbar`, one module each: options in, one file at most out, and what came of it in words or JSON.

A command module imports what it needs when the command runs, so that `errbar --help` and the shell's completion load no
torch, and `errbar fit` no report. Shared by the commands: `options` (what can be typed), `inputs`, `rows` and `images`
(data), `models`, `posteriors` and `predictions`, `user_code` and `extras` (imports by name), `output` (files of
results) and `session` (what surrounds a command).
"""
