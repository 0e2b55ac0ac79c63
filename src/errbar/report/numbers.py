"""Numbers as text for the page: with a true minus sign, and with spaces at which lines do not break."""

from __future__ import annotations

import math

from errbar.report.values import Estimate

_SPACE = "\u202f"  # narrow, no-break


def percent(value: float, digits: int = 1) -> str:
    """A fraction in per cent.

    >>> percent(0.1234), percent(-0.0004), percent(math.nan)
    ('12.3\u202f%', '0.0\u202f%', '–')
    """
    return f"{fixed(100 * value, digits)}{_SPACE}%" if math.isfinite(value) else special(value)


def fixed(value: float, digits: int) -> str:
    """A number with `digits` decimals."""
    if not math.isfinite(value):
        return special(value)
    text = f"{value:,.{digits}f}".replace(",", _SPACE)
    if not text.strip("-0.," + _SPACE):
        text = text.removeprefix("-")
    return text.replace("-", "\u2212")


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits.

    >>> significant(0.012345), significant(1234567.0), significant(0.0)
    ('0.0123', '1.23·10⁶', '0')
    """
    if not math.isfinite(value):
        return special(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 6:
        text = fixed(value, max(0, digits - 1 - exponent))
        return text.rstrip("0").rstrip(".") if "." in text else text
    power = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{fixed(value / 10**exponent, digits - 1)}·10{power}"


def count(value: int) -> str:
    """A whole number in groups of three.

    >>> count(50000), count(999)
    ('50\u202f000', '999')
    """
    return f"{value:,}".replace(",", _SPACE)


def points(value: float) -> str:
    """A difference of fractions in percentage points."""
    unit = "point" if f"{abs(100 * value):.1f}" == "1.0" else "points"
    return f"{fixed(100 * value, 1)} percentage {unit}"


def span(estimate: Estimate, digits: int = 1, scale: float = 100.0) -> str:
    """The interval of an estimate, in words so that minus signs are not mistaken for dashes."""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return "–"
    return f"{fixed(scale * estimate.low, digits)} to {fixed(scale * estimate.high, digits)}"


def special(value: float) -> str:
    """The sign for infinity or NaN."""
    if math.isnan(value):
        return "–"
    return "∞" if value > 0 else "\u2212∞"
