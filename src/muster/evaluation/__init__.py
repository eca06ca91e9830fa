"""Evaluation of policies on exact numbers of episodes, without bias, in the background or between
batches.
"""

from muster.evaluation.episodes import EvaluatedEpisode, UnfinishedEpisode
from muster.evaluation.evaluator import Evaluator
from muster.evaluation.result import Evaluation, EvaluatorStats

__all__ = [
    "EvaluatedEpisode",
    "Evaluation",
    "Evaluator",
    "EvaluatorStats",
    "UnfinishedEpisode",
]
