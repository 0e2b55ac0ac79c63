"""The numbers in plain words: is it over- or under-confident, by how much, and does T_c help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from errbar._distributions.calibration import Calibration
from errbar._posterior.width import UNCALIBRATED
from errbar.report.numbers import count, fixed, percent, points, significant, span
from errbar.report.values import Estimate, Linearisation, Outliers, ScaleEffect, Variant, Verdict


def direction(gap: Estimate) -> str | None:
    """ "over-confident" or "under-confident" if the interval excludes zero, else None.

    >>> direction(Estimate(0.02, 0.01, 0.03)), direction(Estimate(0.02, -0.01, 0.05))
    ('over-confident', None)
    """
    if gap.low > 0:
        return "over-confident"
    return "under-confident" if gap.high < 0 else None


def verdict(
    inputs: int,
    variants: Sequence[Variant],
    effect: ScaleEffect,
    calibration: Calibration,
    linearisation: Linearisation | None,
    outliers: Outliers | None,
    decisions: str = "",
    by_label: Sequence[tuple[float, float]] = (),
) -> Verdict:
    """What a reader in a hurry should know, of a posterior with this calibration; `decisions` as in `Report`.

    `by_label` are T and T_c of each label, where they are not those of all.
    """
    network, final = variants[0], variants[-1]
    sentences = [
        _of_network(network, decisions or f"{count(inputs)} inputs"),
        _of_final(network, final),
        _of_scale(effect, calibration, "decision" if decisions else "input", by_label),
    ]
    if linearisation is not None:
        sentences.append(_of_linearisation(linearisation))
    if outliers is not None:
        sentences.append(_of_outliers(outliers))
    if calibration == Calibration():
        sentences.append(f"{UNCALIBRATED} errbar.calibrate fits both to held-out data.")
    return Verdict(headline(network, final), tuple(sentences))


def headline(network: Variant, final: Variant) -> str:
    """The one sentence."""
    before, after = direction(network.gap), direction(final.gap)
    size = points(abs(final.gap.value))
    if before is None and after is None:
        return "No sign of over- or under-confidence on average, with or without error bars."
    if before is None:
        return f"The network alone shows no sign of over- or under-confidence; with error bars it is {after} by {size}."
    alone = f"The network alone is {before} by {points(abs(network.gap.value))}"
    if after is None:
        return f"{alone}; with error bars it shows no sign of over- or under-confidence."
    if after == before:
        return f"{alone}; with error bars still by {size}."
    return f"{alone}; with error bars it is {after} by {size}."


def _of_network(network: Variant, what: str) -> str:
    way = direction(network.gap)
    opening = (
        f"Of {what} the network is right about {percent(network.accuracy.value)} and claims "
        f"{percent(network.confidence)} on average: "
    )
    interval = f"95\u202f% interval {span(network.gap)}"
    if way is None:
        return f"{opening}a difference of {points(network.gap.value)} ({interval}), which may be chance."
    return f"{opening}{way} by {points(abs(network.gap.value))} (claimed minus right: {interval})."


def _of_final(network: Variant, final: Variant) -> str:
    way = direction(final.gap)
    text = (
        f"With the error bars averaged in{' and calibrated' if final.key.startswith('after') else ''} it claims "
        f"{percent(final.confidence)} and is right about {percent(final.accuracy.value)}: "
    )
    if way is None:
        text += (
            f"a difference of {points(final.gap.value)} (95\u202f% interval {span(final.gap)}), which may be chance. "
        )
    else:
        text += f"{way} by {points(abs(final.gap.value))} (claimed minus right: 95\u202f% interval {span(final.gap)}). "
    return text + (
        f"The calibration error (ECE) goes from {_with_interval(network.ece)} to {_with_interval(final.ece)}, the NLL "
        f"from {fixed(network.nll.value, 4)} to "
        f"{fixed(final.nll.value, 4)}."
    )


def _with_interval(estimate: Estimate) -> str:
    """In per cent, with the interval if there is one."""
    interval = f" ({span(estimate)})" if math.isfinite(estimate.low) else ""
    return percent(estimate.value) + interval


def _of_scale(
    effect: ScaleEffect, calibration: Calibration, noun: str = "input", by_label: Sequence[tuple[float, float]] = ()
) -> str:
    """Whether the covariance does more than a temperature alone."""
    T, scale, softening = vars(calibration).values()
    softened = f", and the softening c is {significant(softening)}" if softening else ""
    if scale == 0 and softening:
        return f"T_c is 0, which switches the error bars off{softened}: this is temperature scaling by T(x)."
    if scale == 0:
        return "T_c is 0, which switches the error bars off: this is plain temperature scaling."
    gain = effect.gain
    about = f"T_c is {significant(scale)} and T is {significant(T)}{softened}. "
    if by_label:
        temperatures, scales = zip(*by_label, strict=True)
        about = f"T_c of the labels is {_ends(scales)} and T is {_ends(temperatures)}{softened}. "
    bars = (
        f"The probability of the most likely class has a standard deviation of {points(effect.std)} on average, "
        "which no temperature gives."
    )
    rival = (
        f"plain temperature scaling (T_c = 0), even with its T ({significant(effect.temperature)}) chosen on these "
        "same data"
    )
    size = f"{significant(abs(gain.value), 2)} nats per {noun} (gain: 95\u202f% interval {span(gain, 4, 1.0)})"
    if not math.isfinite(gain.value):
        return (
            about
            + "The predicted probability of a label was zero, so the NLL is infinite and says nothing about T_c. "
            + bars
        )
    if gain.low > 0:
        return (
            f"{about}The covariance improves the probabilities: the NLL is lower than that of {rival}, by "
            f"{size}. {bars}"
        )
    if gain.high < 0:
        return (
            f"{about}For the probabilities alone, T_c does not pay off here: plain temperature scaling (T_c = 0) has a "
            f"lower NLL, by {size}; its T ({significant(effect.temperature)}) was chosen on these same data, which "
            f"favours it. {bars}"
        )
    return (
        f"{about}For the probabilities alone, T_c does nothing that a temperature could not: compared with {rival}, "
        f"the NLL differs by {size}, which may be chance. {bars}"
    )


def _ends(values: Sequence[float]) -> str:
    return f"{significant(min(values))} to {significant(max(values))}"


def _of_linearisation(check: Linearisation) -> str:
    opening = (
        f"The linearisation was checked with {check.draws} networks drawn from the posterior: PMFs differ by "
        f"{percent(check.distance)} in total variation on average, of which {percent(check.noise)} is noise from the "
        "draws"
    )
    if not math.isfinite(check.ratio.value):
        return f"{opening}."
    if check.distance <= 2 * check.noise and 0.8 <= check.ratio.value <= 1.25:
        return f"{opening}: nothing speaks against it."
    wider = "wider" if check.ratio.value > 1 else "narrower"
    return (
        f"{opening}, and the drawn networks spread {wider} than the delta method says, by a factor of "
        f"{fixed(check.ratio.value, 2)}."
    )


def _of_outliers(outliers: Outliers) -> str:
    best = max(outliers.rows, key=lambda row: row.auroc.value)
    return (
        f"Inputs of {outliers.name} are told from these best by “{best.name}”: AUROC {fixed(best.auroc.value, 3)} "
        f"({span(best.auroc, 3, 1.0)})."
    )
