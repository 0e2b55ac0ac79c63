"""The version of the package, where files can be stamped with it."""

__version__ = "0.1.0"
