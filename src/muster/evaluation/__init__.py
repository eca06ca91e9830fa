"""Evaluation of policies on exact numbers of episodes, without bias, in the background or between
batches.
"""

from muster.evaluation.evaluator import Evaluator
from muster.evaluation.result import EvaluatedEpisode, Evaluation, EvaluatorStats, UnfinishedEpisode

__all__ = ["EvaluatedEpisode", "Evaluation", "Evaluator", "EvaluatorStats", "UnfinishedEpisode"]
