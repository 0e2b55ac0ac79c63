"""Options with few values: another value is a usage error, whose message lists these."""

from __future__ import annotations

from enum import StrEnum


class FisherChoice(StrEnum):
    GGN = "ggn"
    ETA = "eta"


class StructureChoice(StrEnum):
    AUTO = "auto"
    DENSE = "dense"
    BLOCK = "block"
    KRON = "kron"
    LOWRANK = "lowrank"
    DIAG = "diag"


class PrecisionChoice(StrEnum):
    MODEL = "model"
    FLOAT64 = "float64"


class ObjectiveChoice(StrEnum):
    NLL = "nll"
    BRIER = "brier"
    ECE = "ece"


class ScaleChoice(StrEnum):
    TEMPERATURE = "temperature"
    COVARIANCE_SCALE = "covariance-scale"


class SuspicionChoice(StrEnum):
    LABEL_SUSPICION = "label-suspicion"
    MUTUAL_INFORMATION = "mutual-information"
    CONTRAST_VARIANCE = "contrast-variance"


class DrawsChoice(StrEnum):
    RANDOM = "random"
    ANTITHETIC = "antithetic"
    SOBOL = "sobol"


class OutputChoice(StrEnum):
    PMF = "pmf"
    STD = "std"
    COVARIANCE = "covariance"
    LOGITS = "logits"
    LOGIT_COVARIANCE = "logit-covariance"
    RISK = "risk"
