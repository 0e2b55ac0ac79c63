"""Where things lie: the project, the tests, and what several of them share."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
FORMAT_FILES = TESTS / "files"
